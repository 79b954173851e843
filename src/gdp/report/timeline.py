"""The timeline of a plan: a figure by Matplotlib for papers and notebooks, text in a terminal, rows for data frames."""

import base64
import html
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gdp import files
from gdp.cluster import Cluster
from gdp.errors import InputError
from gdp.graph import GraphSource
from gdp.planning.plan_source import simulation_of
from gdp.report.memory_curves import memory_curves
from gdp.report.tables import short
from gdp.report.timeline_text import busy_shares, timeline_text
from gdp.simulator.plan import Plan
from gdp.simulator.simulate import Allocations, Simulation

_PHASES = {"forward": 0, "backward": 1, "update": 2, "": 3}
_COLUMNS = 1400  # as many pixels as the figure is wide
_MOST_POINTS = 2000
_LABEL = 24  # characters of a name


def figure_bytes(simulation: Simulation, kind: str) -> bytes:
    """Returns the figure as a file of `kind` "svg", "png" or "pdf": busy devices, coloured by phase, and memory. The
    height of a row is the busy share of its device in each 1/1400 of the step."""
    graph, cluster = simulation.problem.graph, simulation.problem.cluster
    num_devices = cluster.num_devices

    def draw(figure: Any) -> None:
        rows, memory = figure.subplots(2, 1, sharex=True, height_ratios=[0.4 + 0.28 * num_devices, 1.6])
        end_ms = max(simulation.step_time_ns, 1) / 1e6
        phases = np.array([_PHASES[phase] for phase in graph.phases])
        edges = np.linspace(0, end_ms, _COLUMNS + 1)
        floor = np.repeat(np.arange(num_devices) + 0.4, _COLUMNS).reshape(num_devices, _COLUMNS)  # the axis points down
        for phase, number in _PHASES.items():
            if not (phases == number).any():
                continue
            top = floor - 0.8 * busy_shares(simulation, _COLUMNS, phases == number)
            for device in range(num_devices):
                low, high, colour = np.append(floor[device], 0), np.append(top[device], 0), device_colour(number)
                rows.fill_between(edges, low, high, step="post", linewidth=0, color=colour, label=phase or "other")
            floor = top
        rows.set_yticks(range(num_devices), [short(device.name, _LABEL) for device in cluster.devices])
        rows.set_ylim(num_devices - 0.4, -0.6)
        handles = dict(zip(*reversed(rows.get_legend_handles_labels()), strict=True))
        if handles:
            figure.legend(handles.values(), handles.keys(), loc="outside upper right", ncols=4, frameon=False)
        for curve in memory_curves(simulation, Allocations.of(simulation)):
            times, used = curve.thinned(_MOST_POINTS)
            colour, name = line_colour(curve.device), short(cluster.devices[curve.device].name, _LABEL)
            places = [*(times / 1e6), end_ms], [*(used / 2**30), used[-1] / 2**30]
            memory.step(*places, where="post", linewidth=1, color=colour, label=name)
        highest = int(simulation.peak_memory_bytes.max())
        for limit in sorted(set(simulation.problem.memory_limit_bytes.tolist())):
            if limit <= 4 * highest:
                memory.axhline(limit / 2**30, color="0.3", linestyle="--", linewidth=0.8)
                memory.annotate(
                    "limit", (0, limit / 2**30), (3, -8), textcoords="offset points", fontsize=7, color="0.3"
                )
        memory.set_xlim(0, end_ms)
        memory.set_ylim(bottom=0)
        memory.set_xlabel("ms")
        memory.set_ylabel("GiB")
        memory.legend(ncols=4, fontsize=7, frameon=False)

    return drawn((7.0, 1.6 + 0.28 * num_devices + 1.6), kind, draw)


def drawn(size: tuple[float, float], kind: str, draw: Callable[[Any], None]) -> bytes:
    """Returns what `draw` draws on a figure of Matplotlib, of a `size` in inches, as a file of `kind`."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("figure: Matplotlib is missing; pip install 'gdp-placement[figures]'") from None
    # names are data: no mathematics between dollar signs; fonts stay text in SVG, and files are the same every time
    with mpl.rc_context({"text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": "gdp", "font.size": 8}):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
        content = io.BytesIO()
        figure.savefig(content, format=kind, dpi=200, metadata=undated)
        return content.getvalue()


_OKABE_ITO = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442")
_OTHER = "#8d95a3"


def device_colour(device: int) -> str:
    """Returns the colour of a device by its number; from the ninth on, a darker hue. As in report-palette.js."""
    if device < len(_OKABE_ITO):
        return _OKABE_ITO[device]
    if device == len(_OKABE_ITO):
        return _OTHER
    dark = 0.75 ** min(device // len(_OKABE_ITO), 4)
    colour = _OKABE_ITO[device % len(_OKABE_ITO)]
    return "#" + "".join(f"{round(int(colour[at : at + 2], 16) * dark):02x}" for at in (1, 3, 5))


def line_colour(device: int) -> str:
    """Returns the colour for a thin line on white, where the yellow would be too light."""
    colour = device_colour(device)
    return "#a89b00" if colour == "#f0e442" else colour


_TEXT_COLUMNS = 100
_KINDS = (".svg", ".png", ".pdf")


@dataclass(frozen=True, slots=True)
class OpRun:
    """One op in a step: where and when it runs, in ns from the start of the step."""

    op: str
    device: str
    start_ns: int
    finish_ns: int
    kind: str
    module: str
    phase: str


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """A simulated step over time.

    A terminal shows a line for each device, as high as the device is busy, and a notebook the figure of `gdp report
    --figure`, if Matplotlib is installed. `pandas.DataFrame(timeline.rows)` makes a table."""

    simulation: Simulation

    @property
    def rows(self) -> list[OpRun]:
        """Returns the ops by device, and on each in the order of their starts."""
        step, graph = self.simulation, self.simulation.problem.graph
        devices = step.problem.cluster.devices
        starts, finishes = step.op_start_ns.tolist(), step.op_finish_ns.tolist()
        return [
            OpRun(
                graph.op_names[op],
                devices[device].name,
                starts[op],
                finishes[op],
                graph.kinds[op],
                graph.modules[op],
                graph.phases[op],
            )
            for device, ops in enumerate(step.order)
            for op in ops.tolist()
        ]

    def save(self, path: str | Path) -> Path:
        """Writes the figure to `path`, which ends in .svg, .png or .pdf, and returns the path.

        Raises InputError for another name, and without Matplotlib."""
        path = Path(path)
        if path.suffix not in _KINDS:
            raise InputError(f"{path}: a name that ends in {', '.join(_KINDS)} is expected")
        files.write_bytes(path, figure_bytes(self.simulation, path.suffix[1:]))
        return path

    def __repr__(self) -> str:
        """Returns the lines that a terminal shows."""
        return "\n".join(line.plain.rstrip() for line in timeline_text(self.simulation, _TEXT_COLUMNS))

    def _repr_html_(self) -> str:
        """Returns Jupyter's view: the figure, or the text where Matplotlib is missing."""
        try:
            picture = base64.b64encode(figure_bytes(self.simulation, "png")).decode()
        except InputError:
            return f"<pre>{html.escape(repr(self))}</pre>"
        return f'<img alt="timeline" width="700" src="data:image/png;base64,{picture}">'


def timeline(plan: Plan, graph: GraphSource | None = None, cluster: Cluster | str | None = None) -> Timeline:
    """Returns the step of a plan over time: a figure in a notebook, text elsewhere, and its rows for a data frame.

    A plan from a file reads its graph and devices again; `graph` and `cluster` are others to be taken in their place.
    """
    return Timeline(simulation_of(plan, graph, cluster))
