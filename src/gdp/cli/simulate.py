"""Parses, calls and prints: `gdp simulate`."""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gdp.cli import options
from gdp.cli.shared import NOTHING_FITS, OK, check_writable, fail, print_json, show, warm_up
from gdp.errors import InputError, prefixed, suggest

if TYPE_CHECKING:
    from gdp.simulator.plan import Plan
    from gdp.simulator.problem import Problem
    from gdp.simulator.simulate import Simulation
    from gdp.simulator.throughput import Throughput


@options.with_options
def simulate(
    plan_or_model: options.PlanOrModelArgument,
    devices: options.PlacedDevicesOption = None,
    plan: options.PlanOption = None,
    placement: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A JSON object {op: device} to score, for a MODEL and DEVICES.")
    ] = None,
    *,
    limits: options.ConstraintOptions,
    model_options: options.ReadingOptions,
    batches: options.BatchesOption = None,
    costs: Annotated[
        Path | None, typer.Option(metavar="FILE.npz", help="Write the times of ops on devices and hosts, in ns.")
    ] = None,
    given: options.Given,
    json: options.JsonOption = False,
) -> int:
    """Derive every figure of a plan anew, or score a placement.

    Exit status 2 if the plan has other figures, 3 if it exceeds memory or breaks a constraint."""
    from gdp.cli.inputs import build_problem, open_plan, read_graph, read_planned
    from gdp.planning.options import run_by

    if costs is not None:
        if costs.suffix != ".npz":
            raise InputError(f"--costs {costs}: a name that ends in .npz is expected")
        check_writable(costs)
    if placement is not None:
        if devices is None or plan is not None:
            raise InputError("--placement: scores a placement of a MODEL on --devices; leave --plan out")
        if batches is not None:
            raise InputError("--batches: goes with a PLAN; leave it or --placement out")
        from gdp.cluster import Cluster
        from gdp.models.source import ModelSource

        reading = model_options.reading()
        cluster = Cluster.parse(run_by(devices, None, reading.serving))
        model = read_graph(ModelSource(plan_or_model, reading))
        answer = _scored(build_problem(model.graph, cluster, limits.constraints(cluster)), placement)
    else:
        path = Path(plan_or_model) if plan is None else plan
        source = open_plan(path, given, None if plan is None else plan_or_model, devices)
        model, problem = read_planned(source)
        warm_up(())
        with prefixed(path):
            answer = _derived(source.plan, problem, batches)
    simulation, bound_ns, throughput = answer.simulation, answer.bound_ns, answer.throughput
    from gdp.report import console, documents, sentences

    if costs is not None:
        _write_costs(costs, simulation.problem)
    if json:
        print_json(documents.simulate_document(answer.plan, simulation, bound_ns, model.served, throughput))
    else:
        show(console.simulate_report(answer.headline, simulation, bound_ns, model.served, throughput))
    if throughput is not None and simulation.feasible and throughput.missing_bytes.any():
        lacking = sentences.lacking(simulation.problem.cluster, throughput.missing_bytes)
        return fail(f"{batches} batches in flight do not fit: {lacking}", NOTHING_FITS)
    return OK if simulation.feasible else fail(f"does not fit: {'; '.join(simulation.reasons)}", NOTHING_FITS)


@dataclass(frozen=True, eq=False)
class _Answer:
    """A simulated plan or placement."""

    simulation: "Simulation"
    bound_ns: int
    headline: str
    plan: "Plan | None" = None
    throughput: "Throughput | None" = None


def _derived(plan: "Plan", problem: "Problem", batches: int | None) -> _Answer:
    """Derives the figures of `plan` anew. InputError if it has others."""
    from gdp.report.progress import live
    from gdp.report.tables import format_range

    with live("deriving the figures of the plan"):
        from gdp.bounds.lower_bound import lower_bound
        from gdp.simulator.simulate import replay, verify

        simulation = replay(problem, plan)
        wrong = [text for text in verify(problem, plan) if text not in simulation.reasons]
        bound_ns = lower_bound(problem)
        throughput = _throughput_of(problem, plan, simulation, batches)
    if not wrong and plan.lower_bound_ns > bound_ns:
        wrong.append(f"lower_bound_ns is {plan.lower_bound_ns}; the bound is {bound_ns}")
    if wrong:
        raise InputError(f"the figures are not those of the plan: {', '.join(wrong)}; place the graph anew")
    time = format_range(simulation.step_time_ns, simulation.step_range)
    headline = f"Step time {time} and peak memory are as in the plan."
    return _Answer(simulation, bound_ns, headline, plan, throughput)


def _throughput_of(
    problem: "Problem", plan: "Plan", simulation: "Simulation", num_batches: int | None
) -> "Throughput | None":
    """Returns the throughput of a plan of batches in flight, or of `num_batches` in flight in a plan of one batch. None
    for other plans where no number is asked for."""
    from gdp.parallel.step import in_flight, layout_in_flight
    from gdp.simulator.throughput import Throughput, throughput_of_plan

    if not in_flight(plan.layout):
        return None if num_batches is None else throughput_of_plan(problem, plan, num_batches)
    assert plan.layout is not None
    layout = layout_in_flight(plan.layout)
    if num_batches not in (None, layout.num_parts):
        raise InputError(f"--batches: the plan has {layout.num_parts} in flight; leave the option out")
    return Throughput.of(simulation, layout)


def _scored(problem: "Problem", path: Path) -> _Answer:
    """Simulates the placement in `path`: the name of a device for each op."""
    from gdp.bounds.lower_bound import lower_bound
    from gdp.files import brief, read_json
    from gdp.report.tables import format_range
    from gdp.simulator.simulate import simulate

    devices, graph = read_json(path), problem.graph
    if not isinstance(devices, dict):
        raise InputError(f"{path}: is a {type(devices).__name__}; an object with the device of each op is expected")
    with prefixed(path):
        if unknown := [name for name in devices if name not in graph.op_numbers]:
            raise InputError(
                f"op {unknown[0]!r} is not in {graph.name!r}; {suggest(unknown[0], graph.op_names, most=8)}"
            )
        if missing := [name for name in graph.op_names if name not in devices]:
            raise InputError(f"op {missing[0]!r} has no device; {len(missing):,} of {graph.num_ops:,} ops have none")
        if odd := [name for name in graph.op_names if not isinstance(devices[name], str)]:
            raise InputError(f"op {odd[0]!r} is on {brief(devices[odd[0]])}; the name of a device is expected")
        placement = [problem.cluster.device_number(devices[name]) for name in graph.op_names]
    warm_up(())
    simulation = simulate(problem, placement)
    time = format_range(simulation.step_time_ns, simulation.step_range)
    return _Answer(simulation, lower_bound(problem), f"Step time {time}.")


def _write_costs(path: Path, problem: "Problem") -> None:
    """Writes `op_time_ns` [N, D], the time of each op on each device, -1 where it cannot run, and `host_time_ns`."""
    import numpy as np

    from gdp import files

    content = io.BytesIO()
    np.savez_compressed(content, op_time_ns=problem.op_time_ns, host_time_ns=problem.host_time_ns)
    files.write_bytes(path, content.getvalue())
