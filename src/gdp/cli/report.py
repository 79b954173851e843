"""Writes a plan as a page, a trace, a figure: `gdp report`."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gdp.cli.inputs import check_spares_plan, open_plan, read_planned
from gdp.cli.options import (
    Given,
    JsonOption,
    MemoryOptions,
    PlacedDevicesOption,
    PlacedGraphOption,
    PlanArgument,
    ReadingOptions,
    with_options,
)
from gdp.cli.shared import OK, check_writable, print_json, print_text, warm_up
from gdp.errors import InputError

if TYPE_CHECKING:
    from gdp.report.page_data import PageData
    from gdp.simulator.plan import Baseline
    from gdp.simulator.problem import Problem

_ENDINGS = {
    "--out": (".html", ".htm"),
    "--trace": (".json", ".json.gz"),
    "--figure": (".svg", ".pdf", ".png"),
    "--dot": (".dot", ".gv"),
}
_COMPARE_SECONDS = 30


@with_options
def report(
    plan: PlanArgument,
    graph: PlacedGraphOption = None,
    devices: PlacedDevicesOption = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The page. Default: report.html beside PLAN.")
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Run the classical placers too, and show their times.")
    ] = False,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Chrome trace JSON, for Perfetto: .json or .json.gz.")
    ] = None,
    figure: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Timeline and memory for a paper: .svg, .pdf or .png.")
    ] = None,
    dot: Annotated[Path | None, typer.Option(metavar="FILE", help="DOT for Graphviz, up to 2000 ops.")] = None,
    run: Annotated[
        Path | None, typer.Option("--run", metavar="FILE", help="The output of `gdp run --json` for this plan.")
    ] = None,
    *,
    limits: MemoryOptions,
    model_options: ReadingOptions,
    given: Given,
    json: JsonOption = False,
) -> int:
    """Write PLAN as one HTML page (timeline, memory, critical path, modules), or only the other files asked for."""
    from gdp import files
    from gdp.report.progress import live
    from gdp.report.run_file import read_run

    paths = {"--out": out, "--trace": trace, "--figure": figure, "--dot": dot}
    if not any(paths.values()):
        paths["--out"] = plan.with_name("report.html")
    written = {name: path for name, path in paths.items() if path is not None}
    for name, path in written.items():
        if not path.name.endswith(_ENDINGS[name]):
            raise InputError(f"{name} {path}: a name that ends in {' or '.join(_ENDINGS[name])} is expected")
        check_writable(path)
        check_spares_plan(name, path, plan)
    if len(set(map(os.path.realpath, written.values()))) < len(written):
        raise InputError(f"{' and '.join(written)}: name different files")
    source = open_plan(plan, given, graph, devices)
    read = source.plan
    measured = None if run is None else read_run(run, read)
    _, problem = read_planned(source)
    warm_up(("auto",) if compare and out is not None else ())
    from gdp.simulator.simulate import replay

    try:
        simulation = replay(problem, read)
    except InputError as error:
        raise InputError(f"{plan}: {error}") from None
    baselines = _baselines(problem) if compare and "--out" in written else None
    with live(f"writing {', '.join(map(str, written.values()))}"):
        from gdp.report.page_data import PageData

        data = PageData(read, simulation, run=measured, compared=baselines)
        contents = {path: _content(name, path, data) for name, path in written.items()}  # all, before one is written
        for path, content in contents.items():
            files.write_bytes(path, content)
    if json:
        print_json({"step_time_ns": simulation.step_time_ns, "written": [str(path) for path in written.values()]})
    else:
        print_text(f"Written to {', '.join(map(str, written.values()))}")
    return OK


def _content(option: str, path: Path, data: "PageData") -> bytes:
    """Returns the content of `path`."""
    from gdp import files
    from gdp.report.dot import dot_text
    from gdp.report.figure import figure_bytes
    from gdp.report.page import render
    from gdp.report.trace import trace_document

    simulation = data.simulation
    if option == "--out":
        return render(data).encode()
    if option == "--figure":
        return figure_bytes(simulation, path.suffix[1:])
    if option == "--dot":
        return dot_text(simulation).encode("utf-8", "replace")
    return files.json_bytes(trace_document(simulation))


def _baselines(problem: "Problem") -> "dict[str, Baseline]":
    """Runs the classical placers on the same problem; none starts after half a minute."""
    from gdp.budget import Budget, Clock
    from gdp.placers import CLASSICAL
    from gdp.report.progress import StatusLine, live
    from gdp.search.ops.classical import ClassicalRuns
    from gdp.search.question import Question

    runs = ClassicalRuns(Question.about(problem))
    with live(StatusLine("running the classical placers", _COMPARE_SECONDS)):
        runs.run(list(CLASSICAL), Clock(Budget(seconds=_COMPARE_SECONDS)), all_of_them=False)
    return runs.baselines
