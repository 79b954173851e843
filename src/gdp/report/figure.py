"""Timeline and memory of a simulated step as a figure for papers, drawn by Matplotlib."""

from pathlib import Path
from typing import Any

from gdp.errors import InputError
from gdp.report.colours import device_colour
from gdp.report.memory_curves import Allocations, memory_curves
from gdp.simulate import Simulation

KINDS = (".svg", ".png", ".pdf")
_PHASES = {"forward": 0, "backward": 1, "update": 2, "": 3}
_MOST_POINTS = 2000


def write_figure(path: Path, simulation: Simulation) -> None:
    """Write the figure: a row of ops for each device, coloured by phase, over the memory of each device."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("--figure: Matplotlib is missing; pip install 'gdp-placement[figures]'") from None
    graph, cluster = simulation.problem.graph, simulation.problem.cluster
    num_devices = cluster.num_devices
    # names are data: no mathematics between dollar signs; fonts stay text in SVG, and files are the same every time
    with mpl.rc_context({"text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": "gdp", "font.size": 8}):
        figure = Figure(figsize=(7.0, 1.6 + 0.28 * num_devices + 1.6), layout="constrained")
        rows, memory = figure.subplots(2, 1, sharex=True, height_ratios=[0.4 + 0.28 * num_devices, 1.6])
        end_ms = max(simulation.step_time_ns, 1) / 1e6
        phases = [_PHASES[phase] for phase in graph.phases]
        for device, ops in enumerate(simulation.order):
            for phase, number in _PHASES.items():
                spans = _merged([op for op in ops.tolist() if phases[op] == number], simulation, end_ms)
                if spans:
                    rows.broken_barh(spans, (device - 0.4, 0.8), color=device_colour(number), label=phase or "other")
        rows.set_yticks(range(num_devices), [_short(device.name) for device in cluster.devices])
        rows.set_ylim(num_devices - 0.4, -0.6)
        handles = dict(zip(*reversed(rows.get_legend_handles_labels()), strict=True))
        if handles:
            figure.legend(handles.values(), handles.keys(), loc="outside upper right", ncols=4, frameon=False)
        for curve in memory_curves(simulation, Allocations.of(simulation)):
            times, used = curve.thinned(_MOST_POINTS)
            memory.step(
                [*(times / 1e6), end_ms], [*(used / 2**30), used[-1] / 2**30], where="post", linewidth=1,
                color=device_colour(curve.device), label=_short(cluster.devices[curve.device].name),
            )  # fmt: skip
        highest = int(simulation.peak_memory_bytes.max())
        for limit in sorted(set(simulation.problem.memory_limit_bytes.tolist())):
            if limit <= 4 * highest:
                memory.axhline(limit / 2**30, color="0.3", linestyle="--", linewidth=0.8)
        memory.set_xlim(0, end_ms)
        memory.set_ylim(bottom=0)
        memory.set_xlabel("ms")
        memory.set_ylabel("GiB")
        memory.legend(ncols=4, fontsize=7, frameon=False)
        options: dict[str, Any] = {"metadata": {"Date": None}} if path.suffix == ".svg" else {}
        figure.savefig(path, dpi=200, **options)


def _merged(ops: list[int], simulation: Simulation, end_ms: float) -> list[tuple[float, float]]:
    """(start, length) in ms of the ops, those that are nearer to each other than can be seen as one."""
    gap_ms = end_ms / 4000
    spans: list[tuple[float, float]] = []
    starts, ends = simulation.op_start_ns, simulation.op_finish_ns
    for op in ops:
        start, end = float(starts[op]) / 1e6, float(ends[op]) / 1e6
        if end <= start:
            continue
        if spans and start - sum(spans[-1]) < gap_ms:
            spans[-1] = (spans[-1][0], end - spans[-1][0])
        else:
            spans.append((start, end - start))
    return spans


def _short(name: str) -> str:
    return name if len(name) <= 24 else f"{name[:16]}…{name[-7:]}"
