"""Choices in simulation: layouts of drawn models on drawn machines, and on machines that differ from what is known.

Models have sizes that no published table has, and machines cards and numbers of cards that are drawn. Each layout is
simulated on its machine, and with each of four figures 10 % higher: the rate of products, the bandwidth of memory, the
speed of hosts, that of links. The logarithm of its time is linear in those of the figures from there on, so that
thousands of machines are drawn in no time:

    log(time) = log(time on the machine) - sum over figures of sensitivity * log(figure / known figure)

A drawn choice has two machines: its predictions are those of one whose figures are up to some 40 % off, and its times
those of one that is off the first by as much as ranges of predictions say. No measured time takes part in it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import log
from typing import Any, NamedTuple

import numpy as np

from benchmarks.benchmark import Say
from benchmarks.measured_sources.choices import gpt_traits, spread_of
from benchmarks.measured_sources.gpt import GPTStep, capture, simulated
from benchmarks.measured_sources.source import CapturedGraphs
from gdp.arrays import F64
from gdp.cluster import Cluster, Device
from gdp.cluster.changes import routes_of
from gdp.errors import InputError

_NUM_QUESTIONS, _MOST_CANDIDATES = 24, 12
_STEP = 1.1  # of a figure
_CARDS = ("h100-sxm-80g", "v100-sxm-32g", "l40s-48g", "rtx3090-24g", "a6000-48g", "a30-24g")
_HIDDEN, _LAYERS, _SEQUENCE = (640, 1280, 1792, 2304), (4, 8), (256, 512, 2048)
_MACHINES = 0.35  # deviation of figures of machines, of their logarithms
_DRAWS = 16  # machines that differ from one prediction
_FACTS = "rates", "memory", "hosts", "links"


@dataclass(frozen=True, eq=False)
class DrawnQuestion:
    """Layouts of a drawn model on a drawn machine; N layouts, T traits, K figures of a machine."""

    names: tuple[str, ...]  # [T] of traits
    traits: F64  # [N, T]
    time_ms: F64  # [N]
    spread: F64  # [N] relative deviation of predictions
    sensitivities: F64  # [N, K]

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> "DrawnQuestion":
        """Returns the question of a row of the benchmark."""
        arrays = {name: np.array(document[name], float) for name in ("traits", "time_ms", "spread", "sensitivities")}
        return cls(tuple(document["names"]), **arrays)


class DrawnChoice(NamedTuple):
    """Candidates, and the mean reward of each over machines that differ from the prediction."""

    predicted: F64
    spreads: F64
    traits: F64
    names: Sequence[str]
    rewards: F64


def drawn_questions(graphs: CapturedGraphs, say: Say) -> dict[str, Any]:
    """Returns the layouts of `_NUM_QUESTIONS` drawn questions with their times and sensitivities, as JSON values."""
    generator, questions = np.random.default_rng(47), list[dict[str, Any]]()
    while len(questions) < _NUM_QUESTIONS:
        hidden, layers, sequence = (int(generator.choice(each)) for each in (_HIDDEN, _LAYERS, _SEQUENCE))
        gpus, batch, card = (
            int(generator.choice((2, 4, 8))),
            int(generator.choice((4, 8, 16))),
            str(generator.choice(_CARDS)),
        )
        sizes = {"hidden": hidden, "heads": hidden // 64, "layers": layers, "sequence": sequence}
        layouts = [
            GPTStep(gpus, batch, micro, **sizes, tensor_parallel=tensor, data_parallel=data, pipeline_parallel=stages)
            for micro, tensor, data, stages in product((1, 2, 4), (1, 2), (1, 2, 4, 8), (1, 2, 4))
            if tensor * data * stages == gpus and batch % (data * micro) == 0
        ]
        chosen = generator.permutation(len(layouts))[:_MOST_CANDIDATES]
        steps = sorted((layouts[place] for place in chosen), key=lambda step: step.graph_name)
        try:
            rows = [_row(step, card, graphs) for step in steps]
        except InputError as error:  # cards without links for groups
            say(f"{gpus}x{card}: {error}")
            continue
        say(f"drawn question {len(questions) + 1}: {len(rows)} layouts on {gpus}x{card}")
        questions.append({"names": list(gpt_traits(steps[0])), **{key: [row[key] for row in rows] for key in rows[0]}})
    return {"questions": questions}


def _row(step: GPTStep, card: str, graphs: CapturedGraphs) -> dict[str, Any]:
    graph = graphs.read(step.graph_name, lambda: capture(step))
    cluster = Cluster.parse(f"{step.gpus}x{card}")
    found = simulated(step, graph, cluster)
    sensitivities = [
        log(found.step_time_ns / simulated(step, graph, faster(cluster, fact, _STEP)).step_time_ns) / log(_STEP)
        for fact in _FACTS
    ]
    return {
        "traits": list(gpt_traits(step).values()),
        "time_ms": found.step_time_ns / 1e6,
        "spread": spread_of(None if found.step_kind is None else list(found.step_kind), card),
        "sensitivities": sensitivities,
    }


def faster(cluster: Cluster, fact: str, factor: float) -> Cluster:
    """Returns the machine with one of `_FACTS` higher by a factor."""

    def changed(device: Device) -> Device:
        if fact == "rates":
            rates = {dtype: round(rate * factor) for dtype, rate in device.flops_per_second.items()}
            return replace(device, flops_per_second=rates)
        if fact == "memory":
            return replace(device, memory_bytes_per_second=round(device.memory_bytes_per_second * factor))
        if fact == "hosts":
            times = {name: round(getattr(device, name) / factor) for name in ("issue_ns", "launch_ns")}
            gaps = {name: value / factor for name, value in device.achieved.items() if name.endswith("_ns")}
            return replace(device, **times, achieved={**device.achieved, **gaps})
        return device

    routes = routes_of(cluster)
    if fact == "links":
        for pair, route in routes.items():
            rate, latency = round(route.bytes_per_second * factor), round(route.latency_ns / factor)
            routes[pair] = replace(route, bytes_per_second=rate, latency_ns=latency)
    return Cluster.build(cluster.name, [changed(device) for device in cluster.devices], routes)


def draw_batch(drawn: Sequence[DrawnQuestion], count: int, generator: np.random.Generator) -> list[DrawnChoice]:
    """Returns choices, each of some layouts of a question on a machine of its own."""
    batch = []
    for place in generator.integers(len(drawn), size=count):
        of = drawn[place]
        size = len(of.time_ms)
        kept = generator.permutation(size)[: generator.integers(min(3, size), size + 1)]
        spreads, shares = of.spread[kept], of.sensitivities[kept]
        logs = np.log(of.time_ms[kept]) - shares @ generator.normal(0, _MACHINES, len(_FACTS))
        # figures are off by so much that the times are by what their ranges say; half of the variance is a layout's own
        unit = np.sqrt(np.mean((shares**2).sum(axis=1)))
        deviation = float(spreads.mean()) / 2**0.5
        errors = generator.normal(0, deviation / unit, (_DRAWS, len(_FACTS))) @ shares.T
        actual = np.exp(logs - errors + generator.normal(0, deviation, errors.shape))
        rewards = -np.sqrt(actual / actual.min(axis=1, keepdims=True)).mean(axis=0)
        batch.append(DrawnChoice(np.exp(logs), spreads, of.traits[kept], of.names, rewards))
    return batch
