"""Exports a plan in the format of another tool: `gdp export`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gdp.cli.inputs import check_spares_plan, open_plan, read_planned
from gdp.cli.options import (
    ConstraintOptions,
    Given,
    JsonOption,
    PlacedDevicesOption,
    PlacedGraphOption,
    PlanArgument,
    ReadingOptions,
    TargetOptions,
    group_of,
    with_options,
)
from gdp.cli.shared import NOTHING_FITS, OK, check_writable, fail, print_json, show, warm_up
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
    to: Annotated[str | None, typer.Option("--to", metavar="TARGET", help=_TARGETS)] = None,
    graph: PlacedGraphOption = None,
    devices: PlacedDevicesOption = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Default: beside PLAN, named after TARGET.")] = None,
    *,
    target_options: TargetOptions,
    limits: ConstraintOptions,
    model_options: ReadingOptions,
    given: Given,
    json: JsonOption = False,
) -> int:
    """Write PLAN for another tool, as closely as the tool can express it, and say what that costs."""
    from gdp import files
    from gdp.report.progress import live

    with live("loading gdp"):
        from gdp.export.targets_by_name import find_layout_target

        source = open_plan(plan, given, graph, devices)
        read, asked = source.plan, source.options.get("target")
        name = to or asked
        if name is None:
            raise InputError(f"{plan}: was placed for no target; name one with --to, such as --to hf-device-map")
        layout_target = find_layout_target(name, is_cut=read.layout is not None)
    if layout_target is not None:
        target_options.check_unused()
        path = _path(out, plan, layout_target.file_name)
        _, problem = read_planned(source)
        return _export_layout(problem, read, layout_target, path, json=json)
    target = (group_of(TargetOptions, source.options) if name == asked else target_options).target(name)
    path = _path(out, plan, target.file_name)
    layout = read.layout
    if layout is not None and (layout.get("data") != 1 or layout.get("recompute") != "none" or "offload" in layout):
        raise InputError(
            f"{plan}: has replicas, recomputed blocks or activations on the host, which {target.name} does not take; "
            "export to torch-fsdp, torchtitan or megatron, or place with --parallel none"
        )
    _, problem = read_planned(source)
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
    path = plan.with_name(name) if out is None else out
    check_writable(path)
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

        step = cut_step(problem, plan, target.name, has_stages=target.has_stages, held_by=target.held_by)
        content = target.write(step)
        fits = not step.simulation.missing_bytes.any()
        if fits:
            files.write_bytes(path, content.encode())
    if json:
        print_json(report.layout_document(step, target, content, path if fits else None))
    elif fits:
        show(report.layout_report(step, target, path))
    return OK if fits else fail(report.layout_does_not_fit(step, target), NOTHING_FITS)
