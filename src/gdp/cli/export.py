"""`gdp export`: a plan in the format of a tool that users run."""

from pathlib import Path
from typing import Annotated

import typer

from gdp.cli.inputs import (
    NO_RESERVE,
    DimOption,
    ForbidOption,
    FreeReplicasOption,
    InferenceOption,
    MaxMemoryOption,
    MicrobatchesOption,
    OpCostsOption,
    PinOption,
    ReserveOption,
    check_reads_model,
    check_spares_plan,
    cluster_of_plan,
    constraints_of,
    graph_of_plan,
    reading_of,
)
from gdp.cli.shared import NOTHING_FITS, OK, JsonOption, fail, print_json, show, warm_up

_TARGETS = "hf-device-map, torch-pipelining, onnxruntime, openvino, llama-cpp, vllm or megatron."


def export(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A gdp-plan file, as `gdp place` writes it.")],
    to: Annotated[str, typer.Option("--to", metavar="TARGET", help=_TARGETS)],
    graph: Annotated[
        str | None, typer.Option(metavar="GRAPH", help="What was placed. Default: graph.json.gz beside PLAN.")
    ] = None,
    devices: Annotated[
        str | None, typer.Option(metavar="DEVICES", help="What was placed for. Default: cluster.json beside PLAN.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Default: beside PLAN, named after TARGET.")] = None,
    pin: PinOption = None,
    forbid: ForbidOption = None,
    max_memory: MaxMemoryOption = None,
    reserve: ReserveOption = NO_RESERVE,
    microbatches: MicrobatchesOption = 1,
    free_replicas: FreeReplicasOption = False,
    inference: InferenceOption = False,
    dim: DimOption = None,
    op_costs: OpCostsOption = None,
    json: JsonOption = False,
) -> int:
    """Write PLAN for a tool, as near to it as the tool can express, and say what that costs."""
    from gdp import files, options
    from gdp.export.targets import find_target
    from gdp.plan import Plan

    target = find_target(to)
    path = plan.with_name(target.file_name) if out is None else out
    options.check_writable(path)
    check_spares_plan("--out", path, plan)
    read = Plan.load(plan)
    reading = reading_of(microbatches, free_replicas, inference, dim, op_costs)
    check_reads_model(graph, reading)
    cluster = cluster_of_plan(plan, devices)
    source = graph_of_plan(plan, read, cluster, graph, reading)
    constraints = constraints_of(cluster, pin, forbid, max_memory, reserve)
    from gdp.problem import Problem

    problem = Problem.build(source, cluster, **vars(constraints))
    target.read_units(problem)  # what cannot be exported is better known now
    warm_up()
    from gdp.export.snap import snap
    from gdp.report import export as report

    snapped = snap(problem, read, target)
    fits = not snapped.simulation.missing_bytes.any()
    if fits:
        files.write_bytes(path, snapped.content.encode())
    if json:
        print_json(report.export_document(snapped, path if fits else None))
    elif fits:
        show(report.export_report(snapped, path))
    return OK if fits else fail(report.does_not_fit(snapped), NOTHING_FITS)
