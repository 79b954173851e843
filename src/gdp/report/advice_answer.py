"""Shows advice on other machines: changes that were tried after a search."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from rich.console import RenderableType
from rich.text import Text

from gdp.planning.advice import LAYOUTS, Advice
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
