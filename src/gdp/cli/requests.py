"""Requests to a decoder: its prefill, read and with layers where a plan has them, and the rate that both sustain."""

from collections import Counter
from dataclasses import replace

import numpy as np

from gdp.cli.inputs import read_graph
from gdp.cli.request import PlaceRequest
from gdp.cluster.device import CUDA_GRAPHS, EAGER
from gdp.errors import InputError
from gdp.export.adapt import in_same_places
from gdp.export.targets_by_name import serving_target
from gdp.models.hugging_face import sizes
from gdp.models.model import Model
from gdp.models.serving import Requests, ServedStep
from gdp.models.shards import WHOLE
from gdp.models.source import ModelSource
from gdp.parallel.step import BatchStream
from gdp.planning.plan_cache import KeptAnswer
from gdp.search.batches.place_batches import throughput_of
from gdp.simulator.plan import Plan
from gdp.simulator.problem import Placement, Problem
from gdp.simulator.simulate import Simulation


def prompt_of(request: PlaceRequest, served: ServedStep | None) -> int | None:
    """Returns the tokens of a request's prompt, `?prompt=`; None where it is not said."""
    return None if served is None or served.phase != "decode" else sizes.parse(request.model)[1].prompt


def read_prefill(request: PlaceRequest, served: ServedStep, plan: Plan) -> Model:
    """Reads the prefill of one prompt, cut as `plan` is: of the whole context, unless MODEL says otherwise."""
    serving = replace(request.reading.serving, phase="prefill")
    reading = replace(request.reading, batch=None, serving=serving)
    source = ModelSource(sizes.of_prompt(request.model, served.context), reading)
    return read_graph(source if plan.shards == WHOLE else source.sharded(plan.shards, request.cluster))


def on_its_devices(plan: Plan, problem: Problem) -> Problem:
    """Returns the problem of one whole step on the groups of `plan`, or `problem`, where it is on devices as asked."""
    return plan.problem if plan.problem is not None and plan.num_ranks > 1 else problem


def first_token(request: PlaceRequest, problem: Problem, placement: Placement, prefill: Model) -> Simulation:
    """Returns the step of `prefill` with layers where `placement` of a decode `problem` has them. Servers replay decode
    from CUDA graphs, but no prefill, whose prompts are of any length."""
    is_on_groups = any(device.group for device in problem.cluster.devices)
    target = serving_target(problem) if request.target is None or is_on_groups else request.target
    if target is None:
        raise InputError("no server that is known runs the model")
    cluster = problem.cluster
    if any(device.runtime == CUDA_GRAPHS for device in cluster.devices):
        cluster = cluster.run_by(EAGER)
    return in_same_places(target, problem, placement, Problem.build(prefill.graph, cluster))


def requests_of(request: PlaceRequest, served: ServedStep, problem: Problem, found: KeptAnswer) -> Requests:
    """Returns the arithmetic on requests to the server that `found` is; `problem` is that of a decode step."""
    prompt, prefill = prompt_of(request, served), read_prefill(request, served, found.plan)
    assert prompt is not None
    problem = on_its_devices(found.plan, problem)
    counts = served.num_sequences, served.context - prompt
    if found.batches is None or found.batches.best is None:
        step_ns = found.plan.step_time_ns
        first_ns = first_token(request, problem, found.plan.placement, prefill).step_time_ns
        return Requests(first_ns, first_ns, step_ns, step_ns, *counts)
    best = found.batches.best
    assert isinstance(best.step, BatchStream)
    problem = Problem.build(best.step.batch, best.problem.cluster)  # where its devices may be groups
    kinds = Counter(tuple(problem.cluster.devices[device].kind for device in devices) for devices in best.devices)
    first_ns, rate = 0, 0.0
    for own, count in kinds.items():  # replicas of one kind take the same time
        devices = next(
            devices for devices in best.devices if tuple(problem.cluster.devices[n].kind for n in devices) == own
        )
        step = first_token(request, problem, np.array(devices)[best.places], prefill)
        ops = np.arange(step.problem.num_ops), step.placement
        hosts_ns = np.bincount(step.placement, step.problem.host_time_ns[ops])  # that issue while their devices compute
        busiest_ns = max(step.busy_fraction.max() * step.step_time_ns, hosts_ns.max())
        first_ns, rate = max(first_ns, step.step_time_ns), rate + count / busiest_ns  # prompts follow one another
    figures = throughput_of(best)
    return Requests(first_ns, int(1 / rate), figures.time_per_batch_ns, figures.latency_ns, *counts)
