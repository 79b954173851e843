"""`gdp export`: a plan in the format of a tool that users run."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gdp.cli_inputs import (
    DimOption,
    FreeReplicasOption,
    InferenceOption,
    MaxMemoryOption,
    MicrobatchesOption,
    OpCostsOption,
    ReserveOption,
    constraints_of,
    read_graph,
    reading_of,
)
from gdp.cli_shared import NOTHING_FITS, OK, JsonOption, fail, print_json, show, warm_up
from gdp.errors import InputError

if TYPE_CHECKING:
    from gdp.cluster import Cluster
    from gdp.graph import Graph
    from gdp.plan import Plan


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
    max_memory: MaxMemoryOption = None,
    reserve: ReserveOption = "0%",
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
    needed = {os.path.realpath(plan.with_name(name)) for name in (plan.name, "graph.json.gz", "cluster.json")}
    if os.path.realpath(path) in needed:
        raise InputError(f"--out {path}: the plan needs that file; name another one")
    read = Plan.load(plan)
    reading = reading_of(microbatches, free_replicas, inference, dim, op_costs)
    given = {"--microbatches": microbatches > 1, "--inference": inference, "--dim": dim, "--op-costs": op_costs}
    if graph is None and (names := [name for name, value in given.items() if value]):
        raise InputError(
            f"{names[0]}: says how the MODEL of --graph is read; graph.json.gz beside the plan has it already"
        )
    cluster = _cluster(plan, devices)
    source = _graph(plan) if graph is None else read_graph(graph, reading).graph
    _check_belongs(read, plan, source, cluster)
    constraints = constraints_of(cluster, None, None, max_memory, reserve)
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


def _cluster(plan: Path, devices: str | None) -> "Cluster":
    from gdp.cluster import Cluster

    beside = plan.with_name("cluster.json")
    if devices is None and not os.path.isfile(beside):
        raise InputError(f"{plan}: no cluster.json beside it; name what it was placed for with --devices")
    return Cluster.parse(devices or str(beside))


def _graph(plan: Path) -> "Graph":
    from gdp.graph import Graph

    beside = plan.with_name("graph.json.gz")
    if not os.path.isfile(beside):
        raise InputError(f"{plan}: no graph.json.gz beside it; name what was placed with --graph")
    return Graph.load(beside)


def _check_belongs(read: "Plan", plan: Path, graph: "Graph", cluster: "Cluster") -> None:
    try:
        read.check_belongs(graph, cluster)
    except InputError as error:
        raise InputError(f"{plan}: {error}; or name its own with --graph and --devices") from None
