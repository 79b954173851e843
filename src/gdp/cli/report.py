"""`gdp report`: a plan as a page to look at, a trace, a figure."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gdp.cli.inputs import (
    NO_RESERVE,
    DimOption,
    FreeReplicasOption,
    InferenceOption,
    MaxMemoryOption,
    MicrobatchesOption,
    OpCostsOption,
    ReserveOption,
    check_reads_model,
    check_spares_plan,
    cluster_of_plan,
    constraints_of,
    graph_of_plan,
    reading_of,
)
from gdp.cli.shared import OK, JsonOption, print_json, print_text, warm_up
from gdp.errors import InputError

if TYPE_CHECKING:
    from gdp.plan import Baseline
    from gdp.problem import Problem
    from gdp.report.page_data import Told

_ENDINGS = {
    "--out": (".html", ".htm"), "--trace": (".json", ".json.gz"), "--figure": (".svg", ".pdf", ".png"),
    "--dot": (".dot", ".gv"), "--node-data": (".json", ".json.gz"), "--explorer-graph": (".json", ".json.gz"),
}  # fmt: skip
_COMPARE_SECONDS = 30


def report(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A gdp-plan file, as `gdp place` writes it.")],
    graph: Annotated[
        str | None, typer.Option(metavar="GRAPH", help="What was placed. Default: graph.json.gz beside PLAN.")
    ] = None,
    devices: Annotated[
        str | None, typer.Option(metavar="DEVICES", help="What was placed for. Default: cluster.json beside PLAN.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The page. Default: report.html beside PLAN."),
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Run the classical placers too, for their times.")] = False,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Chrome trace JSON, for Perfetto: .json or .json.gz.")
    ] = None,
    figure: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Timeline and memory for a paper: .svg, .pdf or .png.")
    ] = None,
    dot: Annotated[Path | None, typer.Option(metavar="FILE", help="DOT for Graphviz, up to 2000 ops.")] = None,
    node_data: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Node data for Model Explorer: the device of each op.")
    ] = None,
    explorer_graph: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The graph for Model Explorer, which node data go on.")
    ] = None,
    run: Annotated[
        Path | None, typer.Option("--run", metavar="FILE", help="What `gdp run --json` printed of this plan.")
    ] = None,
    max_memory: MaxMemoryOption = None,
    reserve: ReserveOption = NO_RESERVE,
    microbatches: MicrobatchesOption = 1,
    free_replicas: FreeReplicasOption = False,
    inference: InferenceOption = False,
    dim: DimOption = None,
    op_costs: OpCostsOption = None,
    json: JsonOption = False,
) -> int:
    """Write PLAN as one HTML page (timeline, memory, critical path, modules), or only the other files asked for."""
    from gdp import files, options
    from gdp.plan import Plan
    from gdp.report.page_data import Told
    from gdp.report.progress import live
    from gdp.report.run_file import read_run

    others = {
        "--trace": trace, "--figure": figure, "--dot": dot, "--node-data": node_data, "--explorer-graph": explorer_graph
    }  # fmt: skip
    if out is None and not any(others.values()):
        out = plan.with_name("report.html")
    written = {name: path for name, path in {"--out": out, **others}.items() if path is not None}
    for name, path in written.items():
        if not path.name.endswith(_ENDINGS[name]):
            raise InputError(f"{name} {path}: a name that ends in {' or '.join(_ENDINGS[name])} is expected")
        options.check_writable(path)
        check_spares_plan(name, path, plan)
    if len(set(map(os.path.realpath, written.values()))) < len(written):
        raise InputError(f"{' and '.join(written)}: name different files")
    read = Plan.load(plan)
    measured = None if run is None else read_run(run, read)
    reading = reading_of(microbatches, free_replicas, inference, dim, op_costs)
    check_reads_model(graph, reading)
    cluster = cluster_of_plan(plan, devices)
    source = graph_of_plan(plan, read, cluster, graph, reading)
    from gdp.problem import Problem

    constraints = constraints_of(cluster, None, None, max_memory, reserve)
    problem = Problem.build(source, cluster, **vars(constraints))
    warm_up()
    from gdp.simulate import replay

    try:
        simulation = replay(problem, read)
    except InputError as error:
        raise InputError(f"{plan}: {error}") from None
    compared = _baselines(problem) if compare and out is not None else None
    with live(f"drawing {source.name}"):
        told = Told(read, simulation, run=measured, compared=compared)
        contents = {path: _content(name, path, told) for name, path in written.items()}  # all, before one is written
        for path, content in contents.items():
            files.write_bytes(path, content)
    if json:
        print_json({"step_time_ns": simulation.step_time_ns, "written": [str(path) for path in written.values()]})
    else:
        print_text(f"Written to {', '.join(map(str, written.values()))}")
    return OK


def _content(option: str, path: Path, told: "Told") -> bytes:
    """What goes to `path`."""
    from gdp import files
    from gdp.report import graph_files
    from gdp.report.figure import figure_bytes
    from gdp.report.page import render
    from gdp.report.trace import trace_document

    simulation = told.simulation
    if option == "--out":
        return render(told).encode()
    if option == "--figure":
        return figure_bytes(simulation, path.suffix[1:])
    if option == "--dot":
        return graph_files.dot_text(simulation).encode("utf-8", "replace")
    document = {
        "--trace": trace_document, "--node-data": graph_files.node_data_document,
        "--explorer-graph": graph_files.explorer_document,
    }[option]  # fmt: skip
    return files.json_bytes(document(simulation))


def _baselines(problem: "Problem") -> "dict[str, Baseline]":
    """What the classical placers make of the same problem; none is begun after half a minute."""
    from gdp.budget import Budget, Clock
    from gdp.placers import CLASSICAL
    from gdp.placers.classical_runs import ClassicalRuns
    from gdp.report.progress import CountdownLine, live

    runs = ClassicalRuns(problem, Clock(Budget.parse("1m")), seed=0)
    line = CountdownLine()
    line.say("classical placers", _COMPARE_SECONDS)
    with live(line):
        runs.run(list(CLASSICAL), until=_COMPARE_SECONDS / 60)
    return runs.baselines
