"""Shows the choice of a layout: in words, and as a table of all layouts that were looked at."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from textwrap import shorten
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from gdp.arrays import unique
from gdp.graph import Graph
from gdp.models.shards import WHOLE
from gdp.notebook import format_gib
from gdp.parallel.layout import BLOCKS, NONE, SELECTIVE, Layout
from gdp.parallel.step import in_flight, layout_in_flight
from gdp.planning.layout_answer import LayoutAnswer
from gdp.report.tables import format_ms, new_table, writable
from gdp.search.candidate import ESTIMATED, NOT_ALLOWED, Candidate
from gdp.simulator.plan import Plan

_MOST_ROWS = 12  # of the table; all are in --json
_MOST_NAMED = 3  # modules
_FAR = 3  # times the bound, which are not told in per cent
_MOST_REASON = 120  # characters of an error in the table
_SHARDED = {1: "optimizer state", 2: "optimizer state and gradients", 3: "parameters, gradients and optimizer state"}


def in_words(layout: Layout, num_places: int) -> str:
    """Returns `4 replicas of the model, one device each, 2 micro-batches each`."""
    counts, shards = layout.microbatches, layout.shards
    if layout.of_groups.is_whole and shards.samples == 1:
        where = f" on groups of {shards.num_ranks} cards" if shards != WHOLE else ""
        return f"one copy of the model{where}, its ops placed one by one"
    parts = [copies_in_words(layout.num_copies, num_places, in_stages=layout.stages is not None)]
    if max(counts) > 1:
        each = " each" if layout.num_copies > 1 and layout.is_even else ""
        numbers = str(counts[0]) if layout.is_even else ", ".join(map(str, counts))
        parts.append(f"in {numbers} micro-batches{each}")
    text = " ".join(parts)
    if shards.samples > 1:
        text += f", experts cut over {shards.samples} of them"
    elif shards != WHOLE:
        text += f", each device a group of {shards.num_ranks} cards ({shards})"
    if layout.zero:
        text += f", {_SHARDED[layout.zero]} cut over them (ZeRO {layout.zero})"
    if layout.recompute != NONE:
        text += f", {_blocks(layout.recompute)} recomputed in the backward pass"
    if layout.offload != NONE:
        text += f", activations of {_blocks(layout.offload)} on the CPU until then"
    return text


def copies_in_words(num_replicas: int, num_places: int, *, in_stages: bool) -> str:
    """Returns `2 replicas of the model on 2 devices in stages each`."""
    copies = "one copy of the model" if num_replicas == 1 else f"{num_replicas} replicas of the model"
    where = "one device" if num_places == 1 else f"{num_places} devices"
    stages = " in stages" if in_stages and num_places > 1 else ""
    return f"{copies} on {where}{stages}{' each' if num_replicas > 1 else ''}"


def _blocks(modules: str | tuple[str, ...]) -> str:
    """Returns `all blocks`, or the modules: by name, if they are few."""
    if isinstance(modules, str):
        but = {BLOCKS: "all blocks", SELECTIVE: "all blocks but for attention and every second product"}
        return but.get(modules, "as many blocks as memory asks for")
    return ", ".join(modules) if len(modules) <= _MOST_NAMED else f"{len(modules)} modules"


def state(candidate: Candidate) -> str:
    """Returns the step time of a candidate, or why it has none."""
    if candidate.refusal is not None:
        return shorten(candidate.refusal, _MOST_REASON) or "not allowed by a constraint"
    lacking = f", {format_gib(candidate.missing_bytes)} too much" if candidate.missing_bytes else ""
    return f"{format_ms(candidate.step_time_ns)}{lacking}"


def choice_report(answer: LayoutAnswer, plan_report: Iterable[RenderableType]) -> Iterator[RenderableType]:
    """Yields the layout in words, a table of layouts, and the report of its plan."""
    best, bound_ns = answer.best, answer.bound_ns
    yield Text(f"Best layout: {in_words(best.layout, best.num_places)} (--parallel {best.option})", style="bold")
    if bound_ns:
        ratio = best.step_time_ns / bound_ns
        yield Text(
            f"No layout of this batch on these devices takes less than {format_ms(bound_ns)}: this plan "
            + (f"is at most {ratio - 1:.1%} above." if ratio < _FAR else f"takes at most {ratio:,.0f} times as long.")
        )
    table = new_table("layout", ">replica on", ">step time", ">fullest device", "limit")
    rows = answer.distinct
    for row in rows[:_MOST_ROWS]:
        fullest = "-" if row.peak_memory_bytes is None else format_gib(max(row.peak_memory_bytes))
        time = "-" if row.status == NOT_ALLOWED else f"{'~' * (row.status == ESTIMATED)}{format_ms(row.step_time_ns)}"
        where = f"{row.num_places} device{'s' * (row.num_places > 1)}"
        table.add_row(row.option, where, time, fullest, row.limit, style="bold" if row is best else None)
    yield table
    if answer.num_moved:
        each = replace(Layout.parse(best.option), stages=best.num_places)
        moved = f"{answer.num_moved:,} ops on devices of other replicas"
        yield Text(f"The search put {moved}; --parallel {each} has none there.")
    if len(rows) > _MOST_ROWS:
        yield Text(f"and {len(rows) - _MOST_ROWS} more, which --json lists")
    estimates = [row for row in rows[:_MOST_ROWS] if row.status == ESTIMATED and not row.missing_bytes]
    if any(row.step_time_ns < best.step_time_ns for row in estimates):
        yield Text("~ is an estimate: the layout was not simulated, and usually takes longer.")
    yield ""
    yield from plan_report


def choice_document(answer: LayoutAnswer) -> dict[str, Any]:
    """Returns the keys of `--json` beside those of every plan."""
    return {
        "layout": answer.best.layout.document(),
        "moved_ops": answer.num_moved,
        "layout_bound_ns": answer.bound_ns,
        "layout_notes": answer.notes,
        "layouts": [
            {
                "option": row.option,
                "layout": row.layout.document(),
                "devices_per_replica": row.num_places,
                "status": row.status,
                "step_time_ns": row.step_time_ns,
                "missing_bytes": row.missing_bytes,
                "peak_memory_bytes": row.peak_memory_bytes,
                "limit": row.limit,
            }
            for row in answer.rows
        ],
    }


def layout_document(plan: Plan, answer: LayoutAnswer | None, graph: Graph) -> dict[str, Any] | None:
    """Returns the layout of a plan of `graph` for a page, in words and as `--parallel` takes it, "" for batches in
    flight; None where it has none. An `answer` adds the layouts that were looked at and the bound of all layouts."""
    if plan.layout is None and answer is None:
        return None
    if plan.layout is not None and in_flight(plan.layout):
        layout, option = layout_in_flight(plan.layout), ""
        num_places = len(unique(plan.placement[graph.replicas == 0]))
        words = f"{copies_in_words(layout.data, num_places, in_stages=False)}, {layout.num_parts} batches in flight"
        words += f", a device being {plan.num_ranks} cards" if plan.num_ranks > 1 else ""
    else:
        layout = Layout() if plan.layout is None else Layout.of_document(plan.layout)
        places = None if plan.layout is None else plan.layout.get("places")
        words = in_words(layout, answer.best.num_places if answer else max(places) + 1 if places else 1)
        option = str(layout) if answer is None else answer.best.option
    rows = [] if answer is None else answer.distinct
    return {
        "words": words,
        "option": option,
        "zero": layout.zero,
        "replicas": layout.data,
        "bound_ns": 0 if answer is None else answer.bound_ns,
        "notes": [] if answer is None else list(map(writable, answer.notes)),
        "rows": [
            {
                "option": row.option,
                "devices": row.num_places,
                "status": row.status,
                "ns": None if row.status == NOT_ALLOWED else row.step_time_ns,
                "fullest": None if row.peak_memory_bytes is None else max(row.peak_memory_bytes),
                "limit": row.limit,
                "plan": answer is not None and row is answer.best,
            }
            for row in rows
        ],
    }
