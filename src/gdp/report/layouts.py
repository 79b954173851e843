"""Shows the choice of a layout: in words, as a table of what was looked at, as JSON."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from textwrap import shorten
from typing import Any

import numpy as np
from rich.console import RenderableType
from rich.text import Text

from gdp.graph import Graph
from gdp.parallel.layout import BLOCKS, NONE, Layout
from gdp.report.tables import format_gib, format_ms, new_table
from gdp.search.layouts.choose import Choice
from gdp.search.layouts.parts import Parts
from gdp.search.layouts.trial import DOES_NOT_FIT, ESTIMATED, NOT_ALLOWED, Trial
from gdp.simulator.plan import Plan

_MOST_ROWS = 12  # of the table; all are in --json
_MOST_NAMED = 3  # modules
_MOST_REASON = 120  # characters of an error in the table
_RANDOM = ("dropout", "bernoulli")  # in kinds of ops
_MOST_LOST = 0.02  # of the flops: rnnlm-2 in 4 parts has 0.8% more, whose products of weights are not cut
_SHARDED = {1: "optimizer state", 2: "optimizer state and gradients", 3: "parameters, gradients and optimizer state"}


def in_words(layout: Layout, num_places: int) -> str:
    """Returns `4 replicas of the model, one device each, 2 micro-batches each`."""
    counts = layout.microbatches
    if layout.is_whole:
        return "one copy of the model, its ops placed one by one"
    parts = ["one copy of the model" if layout.data == 1 else f"{layout.data} replicas of the model"]
    where = "one device" if num_places == 1 else f"{num_places} devices"
    where += " in stages" if layout.stages is not None and num_places > 1 else ""
    parts.append(f"on {where}{' each' if layout.data > 1 else ''}")
    if max(counts) > 1:
        each = " each" if layout.data > 1 and layout.is_even else ""
        numbers = str(counts[0]) if layout.is_even else ", ".join(map(str, counts))
        parts.append(f"in {numbers} micro-batches{each}")
    text = " ".join(parts)
    if layout.zero:
        text += f", {_SHARDED[layout.zero]} cut over them (ZeRO {layout.zero})"
    if layout.recompute != NONE:
        text += f", {_blocks(layout.recompute)} recomputed in the backward pass"
    if layout.offload != NONE:
        text += f", activations of {_blocks(layout.offload)} on the CPU until then"
    return text


def _blocks(modules: str | tuple[str, ...]) -> str:
    """Returns `all blocks`, or the modules: by name, if they are few."""
    if isinstance(modules, str):
        return "all blocks" if modules == BLOCKS else "as many blocks as memory asks for"
    return ", ".join(modules) if len(modules) <= _MOST_NAMED else f"{len(modules)} modules"


def _cut(trial: Trial) -> Layout:
    """Returns the layout of a trial with the modules that recompute=auto stands for, if it was simulated."""
    return trial.layout if trial.step is None else trial.step.layout


def state(trial: Trial) -> str:
    """Returns the step time of a trial, or why it has none."""
    if trial.status == NOT_ALLOWED:
        return shorten(trial.reason, _MOST_REASON) or "not allowed by a constraint"
    lacking = f", {format_gib(trial.missing_bytes)} too much" if trial.missing_bytes else ""
    return f"{format_ms(trial.step_time_ns)}{lacking}"


def limit(trial: Trial) -> str:
    """Returns what keeps a layout from being faster, or from being used, in a few words."""
    if trial.status == NOT_ALLOWED:
        return shorten(trial.reason, _MOST_REASON) or "a pin or --forbid keeps its replicas from their devices"
    if trial.status == ESTIMATED:
        return f"would lack about {format_gib(trial.missing_bytes)}" if trial.missing_bytes else "estimated"
    assert trial.candidate is not None
    simulation = trial.candidate.replay
    devices = simulation.problem.cluster.devices
    if trial.status == DOES_NOT_FIT:
        lacking = int(simulation.missing_bytes.argmax())
        return f"does not fit by {format_gib(int(simulation.missing_bytes[lacking]))} on {devices[lacking].name}"
    busiest = int(simulation.busy_fraction.argmax())
    return f"{devices[busiest].name} computes for {simulation.busy_fraction[busiest]:.0%} of it"


def num_moved(trial: Trial) -> int:
    """Returns the number of ops that a search put on devices of other replicas than their own."""
    if trial.candidate is None or trial.step is None or trial.is_whole:
        return 0
    is_own = np.zeros((trial.layout.data, trial.candidate.replay.problem.num_devices), np.bool_)
    for replica, devices in enumerate(trial.devices):
        is_own[replica, list(devices)] = True
    is_moved = ~is_own[trial.step.replica, trial.candidate.replay.placement]
    return int((is_moved & ~trial.step.is_on_host).sum())


def choice_report(choice: Choice, plan_report: Iterable[RenderableType]) -> Iterator[RenderableType]:
    """Yields the layout in words, a table of layouts, and the report of its plan."""
    trial, bound_ns = choice.trial, choice.layout_bound_ns
    words = in_words(_cut(trial), len(trial.devices[0]))
    yield Text(f"Best layout: {words} (--parallel {trial.layout})", style="bold")
    if bound_ns:
        above = trial.step_time_ns / bound_ns - 1
        yield Text(
            f"No layout of this batch on these devices takes less than {format_ms(bound_ns)}: "
            f"this plan is at most {above:.1%} above."
        )
    table = new_table("layout", ">replica on", ">step time", ">fullest device", "limit")
    rows = _distinct(choice)
    for row in rows[:_MOST_ROWS]:
        fullest = "-"
        if row.candidate is not None:
            fullest = format_gib(int(row.candidate.replay.peak_memory_bytes.max()))
        count = len(row.devices[0])
        time = "-" if row.status == NOT_ALLOWED else f"{'~' * (row.status == ESTIMATED)}{format_ms(row.step_time_ns)}"
        where = f"{count} device{'s' * (count > 1)}"
        table.add_row(str(row.layout), where, time, fullest, limit(row), style="bold" if row is trial else None)
    yield table
    if moved := num_moved(trial):
        each = replace(trial.layout, stages=len(trial.devices[0]))
        yield Text(f"The search put {moved:,} ops on devices of other replicas; --parallel {each} has none there.")
    if len(rows) > _MOST_ROWS:
        yield Text(f"and {len(rows) - _MOST_ROWS} more that are slower or do not fit")
    yield ""
    yield from plan_report


def notes(trial: Trial, parts: Parts) -> Iterator[str]:
    """Yields what a step that is cut does otherwise than the whole one."""
    layout = trial.layout
    if layout.num_parts == 1 or trial.step is None or parts.is_fixed:
        return
    kinds = set(trial.step.graph.kinds)
    samples = parts.batch_size // layout.num_parts
    if any("batch_norm" in kind for kind in kinds):
        yield f"batch normalisation sees {samples} samples at a time instead of {parts.batch_size}, as in DDP"
    if any(name in kind for kind in kinds for name in _RANDOM):
        yield "draws of dropout differ from those of the whole batch"
    whole, cut = (_flops(parts.exact(count)) * count for count in (1, layout.num_parts))
    if abs(cut - whole) > _MOST_LOST * whole:
        yield (
            f"the {layout.num_parts} parts have {cut / whole:.1%} of the flops of the whole step; where the first "
            "dimension of the first input is not the batch, figures are of another step: put the batch first"
        )


def _flops(graph: Graph) -> int:
    """Returns the flops of the passes, without updates."""
    return int(graph.flops[np.isin(graph.phases, ("forward", "backward"))].sum())


def choice_document(choice: Choice) -> dict[str, Any]:
    """Returns `layout`, `layouts` and the bound of any layout, for `--json`."""
    return {
        "layout": _cut(choice.trial).document(),
        "moved_ops": num_moved(choice.trial),
        "layout_bound_ns": choice.layout_bound_ns,
        "layouts": [
            {
                "layout": _cut(row).document(),
                "devices_per_replica": len(row.devices[0]),
                "status": row.status,
                "step_time_ns": row.step_time_ns,
                "peak_memory_bytes": None if row.candidate is None else row.candidate.replay.peak_memory_bytes.tolist(),
                "limit": limit(row),
            }
            for row in choice.trials
        ],
    }


def layout_document(plan: Plan, choice: Choice | None) -> dict[str, Any] | None:
    """Returns the layout of a plan for a page, in words and as `--parallel` takes it; None where it has none.

    A `choice` adds the layouts that were looked at and the bound of all layouts.
    """
    if plan.layout is None and choice is None:
        return None
    layout = Layout() if plan.layout is None else Layout.of_document(plan.layout)
    places = None if plan.layout is None else plan.layout.get("places")
    num_places = len(choice.trial.devices[0]) if choice else max(places) + 1 if places else 1
    rows = [] if choice is None else _distinct(choice)
    return {
        "words": in_words(layout, num_places),
        "option": str(layout),
        "zero": layout.zero,
        "replicas": layout.data,
        "bound_ns": 0 if choice is None else choice.layout_bound_ns,
        "rows": [
            {
                "option": str(row.layout),
                "devices": len(row.devices[0]),
                "status": row.status,
                "ns": None if row.status == NOT_ALLOWED else row.step_time_ns,
                "fullest": None if row.candidate is None else int(row.candidate.replay.peak_memory_bytes.max()),
                "limit": limit(row),
                "plan": choice is not None and row is choice.trial,
            }
            for row in rows
        ],
    }


def _distinct(choice: Choice) -> list[Trial]:
    """Returns the trials, the best first, the best of those with one layout and as many devices a replica."""
    return list(
        {(str(row.layout), len(row.devices[0])): row for row in reversed([choice.trial, *choice.trials])}.values()
    )[::-1]
