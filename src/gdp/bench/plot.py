"""The benchmarks' plots as SVG text: lines over time, and dots by name. White ground, so that they read anywhere."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

# Okabe and Ito's, which the colour-blind tell apart (M. Okabe, K. Ito, "Color universal design", 2008)
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_INK, _GRID = "#222222", "#dddddd"
_WIDTH, _LETTER, _LINE = 720, 6.6, 18  # pixels: of a plot, of a letter at the size used, between two lines of text


@dataclass(frozen=True, slots=True)
class Series:
    """A line: (x, y) points from left to right, and perhaps how far each y is spread."""

    name: str
    points: Sequence[tuple[float, float]]
    spread: Sequence[tuple[float, float]] = ()  # (lowest, highest) of each point


def line_plot(title: str, x_label: str, y_label: str, series: Sequence[Series], x_ticks: Sequence[float]) -> str:
    """Lines over a logarithmic x axis from the first to the last of `x_ticks`; spreads are shaded."""
    heights = [y for line in series for _, y in line.points]
    low, high, y_ticks = _axis([*heights, *(y for line in series for pair in line.spread for y in pair)])
    left, right, top, bottom = 64.0, _WIDTH - 150.0, 2.5 * _LINE, 400.0
    first, last = math.log(x_ticks[0]), math.log(x_ticks[-1])

    def at(x: float, y: float) -> tuple[float, float]:
        across = (math.log(x) - first) / max(last - first, 1e-9)
        return left + across * (right - left), bottom - (y - low) / (high - low) * (bottom - top)

    drawing = _Drawing(title, bottom + 3 * _LINE)
    for tick in y_ticks:
        height = at(x_ticks[0], tick)[1]
        drawing.line((left, height), (right, height), _GRID)
        drawing.text((left - 8, height + 4), f"{tick:g}", "end")
    for tick in x_ticks:
        place = at(tick, low)[0]
        drawing.line((place, bottom), (place, bottom + 5), _INK)
        drawing.text((place, bottom + _LINE + 2), f"{tick:g}", "middle")
    drawing.line((left, bottom), (right, bottom), _INK)
    drawing.text(((left + right) / 2, bottom + 2.2 * _LINE), x_label, "middle")
    drawing.text((left, top - 8), y_label, "start")
    for number, line in enumerate(series):
        colour = _COLOURS[number % len(_COLOURS)]
        if line.spread:
            lower = [at(x, y[0]) for (x, _), y in zip(line.points, line.spread, strict=True)]
            upper = [at(x, y[1]) for (x, _), y in zip(line.points, line.spread, strict=True)]
            drawing.add("polygon", points=_points([*lower, *reversed(upper)]), fill=colour, opacity="0.15")
        drawing.add(
            "polyline", points=_points([at(*point) for point in line.points]), fill="none", stroke=colour,
            **{"stroke-width": "2"},
        )  # fmt: skip
        row = top + number * _LINE
        drawing.line((right + 12, row), (right + 30, row), colour, 2)
        drawing.text((right + 36, row + 4), line.name, "start")
    return drawing.to_text()


def dot_plot(
    title: str, x_label: str, rows: Sequence[tuple[str, Sequence[float]]], *, logarithmic: bool = False
) -> str:
    """A row for each name: a dot for each of its values, and a bar at their geometric mean. 1 is marked."""
    scale, axis = (math.log, _log_axis) if logarithmic else (float, _axis)
    low, high, ticks = axis([1.0, *(value for _, values in rows for value in values)])
    left, right = 24 + _LETTER * max(len(name) for name, _ in rows), _WIDTH - 24.0
    top = 2.5 * _LINE
    bottom = top + 1.5 * _LINE * len(rows)

    def across(value: float) -> float:
        return left + (scale(value) - low) / (high - low) * (right - left)

    drawing = _Drawing(title, bottom + 3 * _LINE)
    for tick in ticks:
        drawing.line((across(tick), top), (across(tick), bottom), _INK if tick == 1 else _GRID)
        drawing.text((across(tick), bottom + _LINE), f"{tick:g}", "middle")
    drawing.text(((left + right) / 2, bottom + 2.2 * _LINE), x_label, "middle")
    for number, (name, values) in enumerate(rows):
        row = top + 1.5 * _LINE * (number + 0.5)
        drawing.text((left - 10, row + 4), name, "end")
        for value in values:
            drawing.add("circle", cx=f"{across(value):.1f}", cy=f"{row:.1f}", r="4", fill=_COLOURS[0], opacity="0.5")
        if values:
            mean = across(math.exp(sum(map(math.log, values)) / len(values)))
            drawing.line((mean, row - 9), (mean, row + 9), _COLOURS[0], 2)
    return drawing.to_text()


class _Drawing:
    """An SVG document that grows."""

    def __init__(self, title: str, height: float) -> None:
        size = {"width": f"{_WIDTH}", "height": f"{height:.0f}", "viewBox": f"0 0 {_WIDTH} {height:.0f}"}
        self.root = Element("svg", size, xmlns="http://www.w3.org/2000/svg")
        self.root.set("font-family", "sans-serif")
        self.root.set("font-size", "12")
        SubElement(self.root, "title").text = title
        self.add("rect", width="100%", height="100%", fill="white")
        self.text((_WIDTH / 2, _LINE), title, "middle", weight="bold")

    def add(self, kind: str, **attributes: str) -> Element:
        return SubElement(self.root, kind, attributes)

    def line(self, begin: tuple[float, float], end: tuple[float, float], colour: str, width: float = 1) -> None:
        (x1, y1), (x2, y2) = begin, end
        self.add(
            "line", x1=f"{x1:.1f}", y1=f"{y1:.1f}", x2=f"{x2:.1f}", y2=f"{y2:.1f}", stroke=colour,
            **{"stroke-width": f"{width:g}"},
        )  # fmt: skip

    def text(self, at: tuple[float, float], text: str, anchor: str, *, weight: str = "normal") -> None:
        place = {"x": f"{at[0]:.1f}", "y": f"{at[1]:.1f}", "fill": _INK}
        self.add("text", **place, **{"text-anchor": anchor, "font-weight": weight}).text = text

    def to_text(self) -> str:
        ElementTree.indent(self.root)
        return ElementTree.tostring(self.root, encoding="unicode") + "\n"


def _axis(values: Sequence[float]) -> tuple[float, float, list[float]]:
    """(lowest, highest, about five round ticks between them) of an axis for `values`."""
    low, high = min(values), max(values)
    room = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    low, high = low - room, high + room
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(step for step in (power, 2 * power, 5 * power, 10 * power) if step >= rough)
    ticks = [round(number * step, 12) for number in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return low, high, ticks


def _log_axis(values: Sequence[float]) -> tuple[float, float, list[float]]:
    """(logarithm of the lowest, of the highest, round ticks between them) of an axis for `values`."""
    low, high, _ = _axis([math.log(value) for value in values])
    decades = range(math.floor(low / math.log(10)), math.ceil(high / math.log(10)))
    ticks = [digit * 10.0**decade for decade in decades for digit in (1, 1.5, 2, 3, 5, 7)]
    return low, high, [tick for tick in ticks if low <= math.log(tick) <= high]


def _points(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
