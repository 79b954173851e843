"""Exports a plan in the format of another tool: `gdp export`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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

if TYPE_CHECKING:
    from gdp.export.layouts.target import LayoutTarget
    from gdp.simulator.plan import Plan
    from gdp.simulator.problem import Problem

_TARGETS = (
    "hf-device-map, torch-pipelining, onnxruntime, openvino, llama-cpp, vllm or megatron; "
    "for plans of --parallel torch-fsdp, torchtitan or megatron."
)


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
    from gdp.report.progress import live

    with live("loading gdp"):
        from gdp.export.layouts.targets import find_layout_target
        from gdp.simulator.plan import Plan

        read = Plan.load(plan)
        layout_target = find_layout_target(to, is_cut=read.layout is not None)
    if layout_target is not None:
        target_options.check_unused()
        problem = problem_of_plan(plan, read, graph, devices, model_options, limits)
        path = _path(out, plan, layout_target.file_name)
        return _export_layout(problem, read, layout_target, path, json=json)
    target = target_options.target(to)
    path = _path(out, plan, target.file_name)
    layout = read.layout
    if layout is not None and (layout.get("data") != 1 or layout.get("recompute") != "none" or "offload" in layout):
        raise InputError(
            f"{plan}: has replicas, recomputed blocks or activations on the host, which {target.name} does not take; "
            "export to torch-fsdp, torchtitan or megatron, or place with --parallel none"
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


def _path(out: Path | None, plan: Path, name: str) -> Path:
    """Returns the file to write: `out`, or `name` beside the plan. InputError if it cannot be written."""
    from gdp.cli import values

    path = plan.with_name(name) if out is None else out
    values.check_writable(path)
    check_spares_plan("--out", path, plan)
    return path


def _export_layout(problem: "Problem", plan: "Plan", target: "LayoutTarget", path: Path, *, json: bool) -> int:
    """Writes a plan with a layout for `target`; returns the exit status."""
    from gdp import files
    from gdp.report.progress import live

    warm_up(())
    with live(f"writing {path}"):
        from gdp.export.layouts.cut_step import cut_step
        from gdp.report import export as report

        step = cut_step(problem, plan, target.name, has_stages=target.has_stages)
        content = target.write(step)
        fits = not step.simulation.missing_bytes.any()
        if fits:
            files.write_bytes(path, content.encode())
    if json:
        print_json(report.layout_document(step, target, content, path if fits else None))
    elif fits:
        show(report.layout_report(step, target, path))
    return OK if fits else fail(report.layout_does_not_fit(step, target), NOTHING_FITS)
