"""Shows exported plans: the loss against the plan, the devices, the file."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from gdp.export.adapt import AdaptedPlan
from gdp.export.export_target import ExportTarget
from gdp.export.layouts.cut_step import CutStep
from gdp.export.layouts.target import LayoutTarget
from gdp.graph import Graph
from gdp.notebook import digits
from gdp.report import sentences
from gdp.report.console import device_report
from gdp.report.documents import cluster_document, graph_document
from gdp.report.tables import format_ms
from gdp.simulator.simulate import Simulation

_WORTH_A_SEARCH = 0.01  # a loss that is more than what two searches of equal budget differ by


def export_report(adapted: AdaptedPlan, path: Path) -> Iterator[RenderableType]:
    """Yields the answer of `gdp export`."""
    problem, target, units = adapted.simulation.problem, adapted.target, adapted.units
    yield Text(f"{problem.graph.name} on {problem.cluster.name} for {target.name}: {units.num_units:,} units")
    yield Text(loss_sentence(adapted), style="bold")
    if adapted.program_order_ns is not None and adapted.program_order_ns != adapted.step_time_ns:
        yield Text(f"With ops started in the order of the program: {format_ms(adapted.program_order_ns)}.")
    if adapted.is_offloaded:
        yield Text("Modules that do not fit keep their weights on the CPU and fetch them when they start.")
    elif adapted.loss > _WORTH_A_SEARCH:
        yield Text(f"gdp place --for {target.name} searches only for plans that {target.name} can express.")
    for note in adapted.notes:
        yield Text(note)
    yield ""
    yield from device_report(adapted.simulation)
    yield ""
    yield Text(f"Written to {path}")
    if "\n" not in (content := adapted.content.strip()) and len(content) <= 200:
        yield Text(content)


def loss_sentence(adapted: AdaptedPlan) -> str:
    """Returns `module level: 341.2 ms instead of 320.1 ms (6.6 % slower)`."""
    return _loss_sentence(adapted.target.level, adapted.step_time_ns, adapted.plan_step_time_ns)


def _loss_sentence(level: str, step_time_ns: int, plan_step_time_ns: int) -> str:
    time = format_ms(step_time_ns)
    if step_time_ns == plan_step_time_ns:
        return f"{level}: {time}, as in the plan"
    loss = step_time_ns / max(plan_step_time_ns, 1) - 1
    word = "slower" if loss > 0 else "faster"
    return f"{level}: {time} instead of {format_ms(plan_step_time_ns)} ({digits(abs(100 * loss), 2)} % {word})"


def layout_report(step: CutStep, target: LayoutTarget, path: Path) -> Iterator[RenderableType]:
    """Yields the answer of `gdp export` for a layout."""
    problem = step.problem
    yield Text(f"{problem.graph.name} on {problem.cluster.name} for {target.name}: {step.layout}")
    sentence = _loss_sentence(target.level, step.simulation.step_time_ns, step.plan_step_time_ns)
    yield Text(sentence, style="bold")
    for note in _layout_notes(step, target):
        yield Text(note)
    yield ""
    yield from device_report(step.simulation, tells_held=not step.held.sentence)
    yield ""
    yield Text(f"Written to {path}")


def _layout_notes(step: CutStep, target: LayoutTarget) -> list[str]:
    refused = [
        f"{held.sentence} So {sentences.lacking(step.problem.cluster, simulation.missing_bytes)}; "
        f"{' '.join(step.held.options)} is written instead."
        for held, simulation in step.refused
    ]
    return [*refused, *target.notes(step)]


def layout_document(step: CutStep, target: LayoutTarget, content: str, path: Path | None) -> dict[str, Any]:
    """Returns the answer of `gdp export --json` for a layout; `path` is None if nothing fits."""
    own = {"layout": step.layout.document(), "devices": step.devices.tolist(), "moved_ops": step.num_moved}
    told = _figures(step.simulation, step.plan_step_time_ns, content, path)
    return _names(step.problem.graph, target, step.simulation) | own | told | {"notes": _layout_notes(step, target)}


def _names(graph: Graph, target: LayoutTarget | ExportTarget, simulation: Simulation) -> dict[str, Any]:
    return {
        "graph": graph_document(graph),
        "cluster": cluster_document(simulation.problem.cluster),
        "target": target.name,
        "level": target.level,
    }


def _figures(simulation: Simulation, plan_step_time_ns: int, content: str, path: Path | None) -> dict[str, Any]:
    return {
        "status": "infeasible" if simulation.missing_bytes.any() else "ok",
        "step_time_ns": simulation.step_time_ns,
        "plan_step_time_ns": plan_step_time_ns,
        "loss": simulation.step_time_ns / max(plan_step_time_ns, 1) - 1,
        "peak_memory_bytes": simulation.peak_memory_bytes.tolist(),
        "busy_fraction": simulation.busy_fraction.tolist(),
        "content": content,
        "path": None if path is None else str(path),
    }


def layout_does_not_fit(step: CutStep, target: LayoutTarget) -> str:
    """Returns one line with the devices that are too small and the bytes that they lack."""
    lacking = sentences.lacking(step.problem.cluster, step.simulation.missing_bytes)
    holds = f" ({step.held.sentence.rstrip('.')})" if step.held.sentence else ""
    return (
        f"nothing fits in memory with {target.level}: {lacking}{holds}; place with more micro-batches, with zero=3 or "
        "recompute=blocks, or add devices or memory"
    )


def export_document(adapted: AdaptedPlan, path: Path | None) -> dict[str, Any]:
    """Returns the answer of `gdp export --json`; `path` is None if nothing fits and nothing was written."""
    own = {
        "offloads": adapted.is_offloaded,
        "num_units": adapted.units.num_units,
        "program_order_step_time_ns": adapted.program_order_ns,
        "notes": adapted.notes,
    }
    told = _figures(adapted.simulation, adapted.plan_step_time_ns, adapted.content, path)
    return _names(adapted.graph, adapted.target, adapted.simulation) | own | told


def does_not_fit(adapted: AdaptedPlan) -> str:
    """Returns one line with the devices that are too small and the bytes that they lack."""
    lacking = sentences.lacking(adapted.simulation.problem.cluster, adapted.simulation.missing_bytes)
    if adapted.problem.graph is not adapted.graph:
        lacking += f" with {adapted.target.name}'s own cache (--ctx)"
    searched = f"place with --for {adapted.target.name}, or " if adapted.target.offload is None else ""
    return f"nothing fits in memory with {adapted.target.level}: {lacking}; {searched}add devices or memory"
