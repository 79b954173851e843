"""Exports a plan in the format of another tool: `gdp export`."""

from pathlib import Path
from typing import Annotated

import typer

from gdp.cli.inputs import check_spares_plan, problem_of_plan
from gdp.cli.options import (
    ConstraintOptions,
    JsonOption,
    PlacedDevicesOption,
    PlacedGraphOption,
    PlanArgument,
    ReadingOptions,
    TargetOptions,
    with_options,
)
from gdp.cli.shared import NOTHING_FITS, OK, fail, print_json, show, warm_up
from gdp.errors import InputError

_TARGETS = "hf-device-map, torch-pipelining, onnxruntime, openvino, llama-cpp, vllm or megatron."


@with_options
def export(
    plan: PlanArgument,
    to: Annotated[str, typer.Option("--to", metavar="TARGET", help=_TARGETS)],
    graph: PlacedGraphOption = None,
    devices: PlacedDevicesOption = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Default: beside PLAN, named after TARGET.")] = None,
    *,
    target_options: TargetOptions,
    limits: ConstraintOptions,
    model_options: ReadingOptions,
    json: JsonOption = False,
) -> int:
    """Write PLAN for another tool, as closely as the tool can express it, and say what that costs."""
    from gdp import files
    from gdp.cli import values
    from gdp.report.progress import live

    with live("loading gdp"):
        from gdp.simulator.plan import Plan

        target = target_options.target(to)
    path = plan.with_name(target.file_name) if out is None else out
    values.check_writable(path)
    check_spares_plan("--out", path, plan)
    read = Plan.load(plan)
    if read.layout is not None and (read.layout.get("data") != 1 or read.layout.get("recompute") != "none"):
        raise InputError(
            f"{plan}: has replicas or recomputed blocks, which no target takes; place with --parallel none"
        )
    problem = problem_of_plan(plan, read, graph, devices, model_options, limits)
    target.read_units(problem)  # a plan that cannot be exported is better known now
    warm_up(())
    with live(f"writing {path}"):
        from gdp.export.adapt import adapt
        from gdp.report import export as report

        adapted = adapt(problem, read, target)
        fits = not adapted.simulation.missing_bytes.any()
        if fits:
            files.write_bytes(path, adapted.content.encode())
    if json:
        print_json(report.export_document(adapted, path if fits else None))
    elif fits:
        show(report.export_report(adapted, path))
    return OK if fits else fail(report.does_not_fit(adapted), NOTHING_FITS)
