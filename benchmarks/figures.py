"""Figures of pages as SVG files, drawn by Matplotlib: lines over time, and dots by name."""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.page import geometric_mean
from gdp.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's, which the colour-blind tell apart (M. Okabe, K. Ito, "Color universal design", 2008)
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
# names are data: no mathematics between dollar signs; fonts stay text in SVG, and files are the same every time
_STYLE = {"text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": "gdp", "font.size": 9}


@dataclass(frozen=True, slots=True)
class Series:
    """A line: (x, y) points from left to right, and the lowest and highest y of each."""

    points: Sequence[tuple[float, float]]
    spread: Sequence[tuple[float, float]]


def line_plot(title: str, x_label: str, y_label: str, series: Mapping[str, Series], x_ticks: Sequence[float]) -> bytes:
    """Returns lines over a logarithmic x axis with `x_ticks`; spreads are shaded."""

    def paint(axes: "Axes") -> None:
        for number, (name, line) in enumerate(series.items()):
            colour = _COLOURS[number % len(_COLOURS)]
            times = [x for x, _ in line.points]
            axes.plot(times, [y for _, y in line.points], color=colour, label=name)
            low, high = [low for low, _ in line.spread], [high for _, high in line.spread]
            axes.fill_between(times, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.set_xscale("log")
        axes.set_xticks(x_ticks, [f"{tick:g}" for tick in x_ticks])
        axes.set_xticks([], minor=True)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.legend(frameon=False)

    return _draw(title, 4.4, paint)


def dot_plot(title: str, label: str, rows: Mapping[str, Sequence[float]], *, logarithmic: bool = False) -> bytes:
    """Returns a row for each name: a dot for each of its values, and a bar at their geometric mean. 1 is marked."""

    def paint(axes: "Axes") -> None:
        for row, values in enumerate(rows.values()):
            axes.plot(values, [row] * len(values), "o", color=_COLOURS[0], alpha=0.5, markersize=5)
            if values:
                axes.plot([geometric_mean(values)], [row], "|", color=_COLOURS[0], markersize=14, markeredgewidth=2)
        axes.axvline(1.0, color="0.3", linewidth=0.8)
        if logarithmic:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter("{x:g}")
            axes.xaxis.set_minor_formatter("{x:g}")
        axes.set_yticks(range(len(rows)), list(rows))
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlabel(label)

    return _draw(title, 0.9 + 0.3 * len(rows), paint)


def require_matplotlib() -> None:
    """Raises InputError if Matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise InputError("--out: Matplotlib is missing; pip install 'gdp-placement[figures]'") from None


def _draw(title: str, height: float, paint: Callable[["Axes"], None]) -> bytes:
    """Returns an SVG file, 7.2 inches wide and `height` high."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=(7.2, height), layout="constrained")
        axes = figure.subplots()
        axes.set_title(title, fontsize=10, fontweight="bold")
        axes.grid(axis="x", color="0.85", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        paint(axes)
        content = io.BytesIO()
        figure.savefig(content, format="svg", metadata={"Date": None})
        return content.getvalue()
