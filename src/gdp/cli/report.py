"""Writes a plan as a page or a figure: `gdp report`."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gdp.cli import options
from gdp.cli.shared import OK, check_writable, print_json, print_text, warm_up
from gdp.errors import InputError, prefixed

if TYPE_CHECKING:
    from gdp.report.page_data import PageData

_ENDINGS = {"--out": (".html", ".htm"), "--figure": (".svg", ".pdf", ".png")}


@options.with_options
def report(
    plan: options.PlanArgument,
    graph: options.PlacedGraphOption = None,
    devices: options.PlacedDevicesOption = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The page. Default: report.html beside PLAN.")
    ] = None,
    figure: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Timeline and memory for a paper: .svg, .pdf or .png.")
    ] = None,
    run: Annotated[
        Path | None, typer.Option("--run", metavar="FILE", help="The output of `gdp run --json` for this plan.")
    ] = None,
    *,
    limits: options.MemoryOptions,
    model_options: options.ReadingOptions,
    given: options.Given,
    json: options.JsonOption = False,
) -> int:
    """Write PLAN as one HTML page (timeline, memory, critical path, modules), or only the other files asked for."""
    from gdp import files
    from gdp.cli.inputs import check_spares_plan, open_plan, read_planned
    from gdp.report.progress import live
    from gdp.report.run_answer import read_run

    paths = {"--out": out, "--figure": figure}
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
    model, problem = read_planned(source)
    warm_up(())
    from gdp.simulator.simulate import replay

    with prefixed(plan):
        simulation = replay(problem, read)
    with live(f"writing {', '.join(map(str, written.values()))}"):
        from gdp.report.page_data import PageData

        data = PageData(read, simulation, run=measured, served=model.served)
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
    from gdp.report.page import render
    from gdp.report.timeline import figure_bytes

    return render(data).encode() if option == "--out" else figure_bytes(data.simulation, path.suffix[1:])
