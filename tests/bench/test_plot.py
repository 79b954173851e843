"""Plots are well-formed SVG that stays on its canvas, in the right order."""

import re
from xml.etree import ElementTree

import pytest

from gdp.bench.plot import Series, dot_plot, line_plot

SVG = "{http://www.w3.org/2000/svg}"
SERIES = [
    Series("a < b", [(1.0, 1.5), (10.0, 1.2), (60.0, 1.0)], [(1.4, 1.7), (1.1, 1.3), (1.0, 1.0)]),
    Series("late", [(30.0, 1.1), (60.0, 1.05)]),
]


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?[\d.]+", text)]


def test_lines_are_drawn_in_order_of_time_on_a_logarithmic_axis() -> None:
    root = ElementTree.fromstring(line_plot("Title", "s", "ratio", SERIES, (1, 10, 60)))
    width, height = (float(root.attrib[name]) for name in ("width", "height"))
    first, second = (numbers(line.attrib["points"]) for line in root.iter(f"{SVG}polyline"))
    across, down = first[::2], first[1::2]
    assert across == sorted(across)
    assert 0 < across[0] < across[-1] < width
    assert down == sorted(down)  # the ratio falls, so the line goes down
    assert 0 < down[0] < down[-1] < height
    # log 10 / log 60 of the way
    assert (across[1] - across[0]) / (across[2] - across[0]) == pytest.approx(0.562, abs=0.001)
    assert second[0] > across[1]
    assert len(list(root.iter(f"{SVG}polygon"))) == 1  # only one has a spread
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"Title", "a < b", "late", "1", "10", "60", "s", "ratio"} <= set(texts)


def test_dots_stand_by_their_names_with_their_geometric_mean() -> None:
    root = ElementTree.fromstring(dot_plot("Title", "ratio", [("full", [0.8, 1.25]), ("none", [])]))
    left, right = (float(dot.attrib["cx"]) for dot in root.iter(f"{SVG}circle"))
    height = next(root.iter(f"{SVG}circle")).attrib["cy"]
    marks = [line.attrib for line in root.iter(f"{SVG}line") if line.attrib["stroke-width"] == "2"]
    assert len(marks) == 1
    assert float(marks[0]["y1"]) < float(height) < float(marks[0]["y2"])
    # sqrt(0.8 * 1.25) = 1, which is (1 - 0.8) / (1.25 - 0.8) of the way
    assert (float(marks[0]["x1"]) - left) / (right - left) == pytest.approx(0.2 / 0.45, abs=0.002)


def test_on_a_logarithmic_axis_the_mean_of_two_is_half_way() -> None:
    root = ElementTree.fromstring(dot_plot("Title", "ratio", [("wide", [0.5, 18.0])], logarithmic=True))
    left, right = (float(dot.attrib["cx"]) for dot in root.iter(f"{SVG}circle"))
    (mark,) = (line.attrib for line in root.iter(f"{SVG}line") if line.attrib["stroke-width"] == "2")
    assert float(mark["x1"]) == pytest.approx((left + right) / 2, abs=0.1)
    ticks = {text.text: float(text.attrib["x"]) for text in root.iter(f"{SVG}text")}
    assert left < ticks["1"] < ticks["1.5"] < ticks["10"] < right


@pytest.mark.parametrize("values", [[1.0], [1.0, 1.0], [0.001, 5000.0]])
def test_axes_have_ticks_whatever_the_values_are(values: list[float]) -> None:
    root = ElementTree.fromstring(dot_plot("Title", "ratio", [("name", values)]))
    dots = [float(dot.attrib["cx"]) for dot in root.iter(f"{SVG}circle")]
    assert all(0 < dot < float(root.attrib["width"]) for dot in dots)
    assert len(list(root.iter(f"{SVG}text"))) >= 4  # title, label, name and a tick
