"""What `gdp export` prints: the loss against the plan, the devices, the file."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from gdp.export.snap import Snapped
from gdp.report.console import device_report
from gdp.report.documents import cluster_document, graph_document
from gdp.report.tables import digits, format_gib, format_ms

_WORTH_A_SEARCH = 0.01  # a loss that is more than what two searches of equal budget differ by


def export_report(snapped: Snapped, path: Path) -> Iterator[RenderableType]:
    """The answer of `gdp export`."""
    problem, target, units = snapped.simulation.problem, snapped.target, snapped.units
    yield Text(f"{problem.graph.name} on {problem.cluster.name} for {target.name}: {units.num_units:,} units")
    yield Text(loss_sentence(snapped), style="bold")
    if snapped.program_order_ns is not None and snapped.program_order_ns != snapped.step_time_ns:
        yield Text(f"With ops started in the order of the program: {format_ms(snapped.program_order_ns)}.")
    if snapped.is_offloaded:
        yield Text("What does not fit keeps its weights on the CPU; each module's are fetched when it begins.")
    elif snapped.loss > _WORTH_A_SEARCH:
        yield Text(f"gdp place --for {target.name} searches among what {target.name} can express.")
    yield ""
    yield from device_report(snapped.simulation)
    yield ""
    yield Text(f"Written to {path}")
    if "\n" not in (content := snapped.content.strip()) and len(content) <= 200:
        yield Text(content)


def loss_sentence(snapped: Snapped) -> str:
    """`module level: 341.2 ms instead of 320.1 ms (6.6 % slower)`."""
    level, time = snapped.target.level, format_ms(snapped.step_time_ns)
    if snapped.step_time_ns == snapped.plan_step_time_ns:
        return f"{level}: {time}, as the plan"
    word = "slower" if snapped.loss > 0 else "faster"
    return (
        f"{level}: {time} instead of {format_ms(snapped.plan_step_time_ns)} "
        f"({digits(abs(100 * snapped.loss), 2)} % {word})"
    )


def export_document(snapped: Snapped, path: Path | None) -> dict[str, Any]:
    """What `gdp export --json` prints; `path` None: nothing was written, for it does not fit."""
    simulation = snapped.simulation
    return {
        "graph": graph_document(simulation.problem.graph),
        "cluster": cluster_document(simulation.problem.cluster),
        "target": snapped.target.name,
        "level": snapped.target.level,
        "offloads": snapped.is_offloaded,
        "status": "infeasible" if simulation.missing_bytes.any() else "ok",
        "num_units": snapped.units.num_units,
        "step_time_ns": snapped.step_time_ns,
        "plan_step_time_ns": snapped.plan_step_time_ns,
        "loss": snapped.loss,
        "program_order_step_time_ns": snapped.program_order_ns,
        "peak_memory_bytes": simulation.peak_memory_bytes.tolist(),
        "busy_fraction": simulation.busy_fraction.tolist(),
        "content": snapped.content,
        "path": None if path is None else str(path),
    }


def does_not_fit(snapped: Snapped) -> str:
    """One line with the devices that are too small and the bytes that they lack."""
    devices = snapped.simulation.problem.cluster.devices
    lacking = [
        f"{device.name} lacks {short} bytes" + (f" ({format_gib(short)})" if short >= 2**20 else "")
        for device, short in zip(devices, snapped.simulation.missing_bytes.tolist(), strict=True)
        if short
    ]
    searched = f"place with --for {snapped.target.name}, or " if snapped.target.offload is None else ""
    return f"nothing fits in memory with {snapped.target.level}: {', '.join(lacking)}; {searched}add devices or memory"
