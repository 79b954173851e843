"""Exports a plan in the format of another tool: `gdp export`."""

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gdp.cli import options
from gdp.cli.shared import NOTHING_FITS, OK, check_writable, fail, print_json, show, warm_up
from gdp.errors import InputError, prefixed

if TYPE_CHECKING:
    from gdp.export.export_target import ExportTarget
    from gdp.export.layouts.target import LayoutTarget
    from gdp.planning.plan_source import PlanSource
    from gdp.simulator.problem import Problem

_TARGETS = (
    "hf-device-map, torch-pipelining, onnxruntime, openvino, llama-cpp, vllm, sglang, tensorrt-llm or megatron; "
    "for plans of --parallel torch-fsdp, torchtitan, megatron or transformers."
)


@options.with_options
def export(
    plan: options.PlanArgument,
    to: Annotated[str | None, typer.Option("--to", metavar="TARGET", help=_TARGETS)] = None,
    graph: options.PlacedGraphOption = None,
    devices: options.PlacedDevicesOption = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Default: beside PLAN, named after TARGET.")] = None,
    *,
    target_options: options.TargetOptions,
    limits: options.ConstraintOptions,
    model_options: options.ReadingOptions,
    given: options.Given,
    json: options.JsonOption = False,
) -> int:
    """Write PLAN for another tool, as closely as the tool can express it, and say what that costs."""
    from gdp.report.progress import live

    with live("loading gdp"):
        from gdp.cli.inputs import open_plan, read_planned
        from gdp.export.export_target import ExportTarget
        from gdp.export.exported_plan import check_takes_layout, exported
        from gdp.export.targets_by_name import find_layout_target, find_target
        from gdp.report import export as report

        source = open_plan(plan, given, graph, devices)
        read, asked = source.plan, source.options.get("target")
        name = to or asked
        if name is None:
            raise InputError(f"{plan}: was placed for no target; name one with --to, such as --to hf-device-map")
        target: ExportTarget | LayoutTarget | None = find_layout_target(name, is_cut=read.layout is not None)
    if target is None:
        if asked is not None and find_target(name).name == find_target(asked).name:
            own = {option: value for option, value in given.items() if option in ("ctx", "split_layers")}
            target_options = options.group_of(options.TargetOptions, source.options | own)
        target = target_options.target(name)
        with prefixed(plan):
            check_takes_layout(read, target)
    else:
        target_options.check_unused()
    path = _path(out, plan, target.file_name)
    _, problem = read_planned(source)
    if isinstance(target, ExportTarget):
        problem = problem if "reserve" in source.options else target.within_share(problem)
        target.read_units(problem)  # a plan that cannot be exported is better known now
    warm_up(())
    with live(f"writing {path}"):
        try:
            answer = exported(problem, read, target, source.known_model)
            answer.content  # noqa: B018 - InputError for what the tool has no words for
        except InputError as error:
            raise InputError(f"{error}{_nearest(source, problem, target)}") from None
        if answer.fits:
            answer.save(path)
    if json:
        print_json(report.export_document(answer, path if answer.fits else None))
    elif answer.fits:
        show(report.export_report(answer, path))
    return OK if answer.fits else fail(report.does_not_fit(answer), NOTHING_FITS)


def _nearest(source: "PlanSource", problem: "Problem", target: "ExportTarget | LayoutTarget") -> str:
    """Returns the quickest layout with other modules recomputed that the tool takes, with its time; "" for none."""
    from gdp.export.exported_plan import exported
    from gdp.parallel.layout import BLOCKS, SELECTIVE, Layout
    from gdp.parallel.step import Step
    from gdp.report.tables import format_ms
    from gdp.search.question import plan_of
    from gdp.simulator.problem import Problem
    from gdp.simulator.simulate import simulate

    plan, found = source.plan, list[tuple[int, str]]()
    if plan.layout is None or not isinstance(plan.layout["recompute"], list) or source.model.is_file:
        return ""
    devices = dict(zip(problem.graph.op_names, plan.placement.tolist(), strict=True))
    for modules in (SELECTIVE, BLOCKS):
        with contextlib.suppress(InputError, KeyError):  # stages of other ops
            layout = dict(plan.layout) | {"recompute": modules}
            step = Step.of_document(lambda num_parts: source.model.part(num_parts).graph, layout)
            other = Problem.build(step.graph, source.cluster, source.constraints)
            placement = [devices[name.replace("!", "")] for name in step.graph.op_names]
            own = replace(plan_of(simulate(other, placement), 0, plan.placer, plan.seed), layout=layout)
            answer = exported(other, own, target, source.model)
            if answer.fits and answer.content:
                found.append((answer.step_time_ns, str(Layout.of_document(layout))))
    return "".join(
        f"; the nearest: --parallel {text}, {format_ms(time_ns)} a step" for time_ns, text in sorted(found)[:1]
    )


def _path(out: Path | None, plan: Path, name: str) -> Path:
    """Returns the file to write: `out`, or `name` beside the plan. InputError if it cannot be written."""
    from gdp.cli.inputs import check_spares_plan

    path = plan.with_name(name) if out is None else out
    check_writable(path)
    check_spares_plan("--out", path, plan)
    return path
