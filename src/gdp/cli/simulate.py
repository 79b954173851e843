"""Parses, calls and prints: `gdp simulate`."""

from pathlib import Path
from typing import Annotated

import typer

from gdp.cli.inputs import build_problem, read_planned
from gdp.cli.options import BatchesOption, ConstraintOptions, DevicesOption, JsonOption, ReadingOptions, with_options
from gdp.cli.shared import NOTHING_FITS, OK, fail, print_json, show, warm_up
from gdp.errors import InputError


@with_options
def simulate(
    graph: Annotated[str, typer.Argument(metavar="GRAPH", help="A gdp-graph file, or any other MODEL.")],
    devices: DevicesOption,
    plan: Annotated[Path, typer.Option(metavar="PLAN", help="A gdp-plan file.")],
    *,
    limits: ConstraintOptions,
    model_options: ReadingOptions,
    batches: BatchesOption = None,
    json: JsonOption = False,
) -> int:
    """Derive every figure of a plan anew.

    Exit status 2 if the plan has other figures, 3 if it exceeds memory or breaks a constraint.
    """
    from gdp.cluster import Cluster
    from gdp.models.source import ModelSource
    from gdp.simulator.plan import Plan

    model = ModelSource(graph, model_options.reading())
    cluster = Cluster.parse(devices)
    read = Plan.load(plan)
    constraints = limits.constraints(cluster)
    source = read_planned(model, read)
    problem = build_problem(source.graph, cluster, constraints)
    warm_up(())
    from gdp.report import console, documents, sentences
    from gdp.report.progress import live

    with live(f"deriving the figures of {plan}"):
        from gdp.bounds.lower_bound import lower_bound
        from gdp.cli.batches import throughput_of
        from gdp.simulator.simulate import replay, verify

        try:
            simulation = replay(problem, read)
            wrong = [text for text in verify(problem, read) if text not in simulation.reasons]
        except InputError as error:
            raise InputError(f"{plan}: {error}") from None
        bound_ns = lower_bound(problem)
        throughput = throughput_of(problem, read, simulation, batches)
    if not wrong and read.lower_bound_ns > bound_ns:
        wrong.append(f"lower_bound_ns is {read.lower_bound_ns}; the bound is {bound_ns}")
    if wrong:
        raise InputError(f"{plan}: the figures are not those of the plan: {', '.join(wrong)}; place the graph anew")
    if json:
        figures = {} if throughput is None else {"throughput": throughput.document()}
        print_json(documents.simulate_document(read, simulation, bound_ns, source.served) | figures)
    else:
        show(console.simulate_report(read, simulation, bound_ns, source.served, throughput))
    if throughput is not None and simulation.feasible and throughput.missing_bytes.any():
        lacking = sentences.lacking(cluster, throughput.missing_bytes)
        return fail(f"{batches} batches in flight do not fit: {lacking}", NOTHING_FITS)
    return OK if simulation.feasible else fail(f"does not fit: {'; '.join(simulation.reasons)}", NOTHING_FITS)
