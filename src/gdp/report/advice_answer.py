"""Shows advice on other machines: changes that were tried after a search, tables of sweeps."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import RenderableType
from rich.text import Text

from gdp.models.serving import ServedStep, serving_entry
from gdp.notebook import format_gib
from gdp.planning.advice import AS_FAST, LAYOUTS, Advice
from gdp.planning.sweep import SweepRow
from gdp.report.tables import format_ms, new_table
from gdp.simulator.simulate import Simulation


def advice_report(advice: Advice, simulation: Simulation) -> Iterator[RenderableType]:
    """Yields a table of changed machines with their step times, and sentences on memory and on fewer devices."""
    step_ns = simulation.step_time_ns
    if changed := [what_if for what_if in advice.what_ifs if what_if.change != LAYOUTS]:
        has_layouts = any(what_if.layout for what_if in changed)
        table = new_table("what if", "", *["layout"] * has_layouts, ">step time", ">of the plan's")
        for what_if in changed:
            ratio = "-" if what_if.step_time_ns is None else f"{what_if.step_time_ns / max(step_ns, 1):.3f}"
            time = "does not fit" if what_if.step_time_ns is None else format_ms(what_if.step_time_ns)
            mark = "~" * bool(what_if.layout and what_if.step_time_ns is not None)  # an estimate
            layout = [what_if.layout] * has_layouts
            table.add_row(what_if.change, what_if.detail, *layout, f"{mark}{time}", ratio)
        yield table
    sentences = list(advice_sentences(advice, simulation))
    if changed and sentences:
        yield ""
    for sentence in sentences:
        yield Text(sentence)


def advice_sentences(advice: Advice, simulation: Simulation) -> Iterator[str]:
    """Yields sentences on faster layouts, on one device fewer, on memory, and on advice that was not tried."""
    step_ns = simulation.step_time_ns
    for what_if in advice.what_ifs:
        if what_if.change == LAYOUTS and what_if.step_time_ns is not None and what_if.step_time_ns < step_ns:
            faster = f"{step_ns / max(what_if.step_time_ns, 1):.2g} times as fast"
            yield f"{LAYOUTS}: about {format_ms(what_if.step_time_ns)}, {faster} ({what_if.layout}, estimated)."
    if advice.one_fewer_is_as_fast(step_ns):
        yield "One device fewer is as fast (within 1 %)."
    if not advice.memory_matters:
        filled = simulation.peak_memory_bytes / np.maximum(simulation.problem.memory_limit_bytes, 1)
        yield f"Memory is not the limit: no device is more than {filled.max():.0%} full."
    if advice.not_asked:
        yield f"Not tried: {'; '.join(advice.not_asked)}."


def advice_document(advice: Advice) -> dict[str, Any]:
    """Returns the advice as in `--json`."""
    return {
        "what_ifs": [
            {"change": item.change, "detail": item.detail, "step_time_ns": item.step_time_ns}
            | ({"layout": item.layout, "is_estimate": True} if item.layout else {})
            for item in advice.what_ifs
        ],
        "not_asked": list(advice.not_asked),
    }


def sweep_line(what: str, row: SweepRow) -> str:
    """Returns the message after one value of a sweep is placed."""
    return f"{what} {row.value}: {_outcome(row)}"


def sweep_report(what: str, rows: Sequence[SweepRow], served: ServedStep | None = None) -> Iterator[RenderableType]:
    """Yields the table of `--sweep`, the fastest in bold, and the smallest value that is about as fast.

    The rows of a `served` step tell its speed.
    """
    times = {row.value: row.plan.step_time_ns for row in rows if row.is_ok and row.plan is not None}
    first_ns, best_ns = next(iter(times.values()), 0), min(times.values(), default=0)
    first = next(iter(times), "")
    speed = () if served is None else (">tokens per second",)
    table = new_table(
        f">{what}", ">step time", *speed, f">speed-up over {first}", ">gap", ">busy", ">fullest device", "order", "note"
    )
    for row in rows:
        plan = row.plan
        if plan is None or plan.search is None or row.cluster is None or not row.is_ok:
            table.add_row(str(row.value), "-", *("-" for _ in speed), "-", "-", "-", "-", "-", _outcome(row))
            continue
        used = np.bincount(plan.placement, minlength=row.cluster.num_devices) > 0
        note = "" if used.all() else f"uses {int(used.sum())}"
        table.add_row(
            str(row.value),
            format_ms(plan.step_time_ns),
            *(() if served is None else (served.rate_text(plan.step_time_ns),)),
            f"{first_ns / max(plan.step_time_ns, 1):.2f}",
            f"{plan.gap:.1%}",
            f"{plan.search.busy_fraction[used].mean():.0%}",
            format_gib(int(plan.peak_memory_bytes.max())),
            plan.search.order,
            note,
            style="bold" if plan.step_time_ns == best_ns else None,
        )
    yield table
    if times:
        enough = next(value for value, time_ns in times.items() if time_ns <= AS_FAST * best_ns)
        yield ""
        yield Text(f"The fewest {what} within 1 % of the fastest: {enough}.")


def sweep_document(
    what: str, rows: Sequence[SweepRow], out: Path | None, served: ServedStep | None = None
) -> dict[str, Any]:
    """Returns the rows of a sweep as in `--json`; those of a `served` step tell its speed."""
    return {
        "sweep": what,
        "rows": [
            {
                what: row.value,
                "status": "failed" if row.plan is None else row.plan.status,
                "step_time_ns": row.plan.step_time_ns if row.plan is not None and row.is_ok else None,
                "lower_bound_ns": None if row.plan is None else row.plan.lower_bound_ns,
                "peak_memory_bytes": None if row.plan is None else row.plan.peak_memory_bytes.tolist(),
                "order": row.plan.search.order if row.plan is not None and row.plan.search is not None else None,
                "plan": str(out / f"{what}-{row.value}" / "plan.json") if out is not None and row.is_ok else None,
                "note": row.note,
            }
            | serving_entry(served, row.plan.step_time_ns if row.plan is not None and row.is_ok else None)
            for row in rows
        ],
    }


def _outcome(row: SweepRow) -> str:
    if row.plan is None:
        return row.note
    if row.is_ok:
        return format_ms(row.plan.step_time_ns)
    assert row.plan.search is not None
    return f"does not fit, {format_gib(int(row.plan.search.missing_bytes.sum()))} missing"
