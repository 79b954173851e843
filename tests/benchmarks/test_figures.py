"""Figures are well-formed SVG with their names as text, the same every time."""

from xml.etree import ElementTree

import pytest

from benchmarks.figures import Series, dot_plot, line_plot


def texts(svg: bytes) -> set[str]:
    """All texts of a figure."""
    return {
        "".join(text.itertext()).strip()
        for text in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    }


def test_lines_have_their_names_and_ticks() -> None:
    """Lines over a logarithmic axis, one of them late and alone in its spread."""
    series = {
        "a < $b$": Series([(1.0, 1.5), (10.0, 1.2), (60.0, 1.0)], [(1.4, 1.7), (1.1, 1.3), (1.0, 1.0)]),
        "late": Series([(30.0, 1.1), (60.0, 1.05)], [(1.1, 1.1), (1.0, 1.1)]),
        "never": Series([], []),
    }
    svg = line_plot("Title", "s", "ratio", series, (1, 10, 60))
    assert {"Title", "a < $b$", "late", "1", "10", "60", "s", "ratio"} <= texts(svg)
    assert svg == line_plot("Title", "s", "ratio", series, (1, 10, 60))


@pytest.mark.parametrize("values", [[1.0], [1.0, 1.0], [0.001, 5000.0], []])
@pytest.mark.parametrize("logarithmic", [False, True])
def test_dots_have_their_names_for_any_values(values: list[float], logarithmic: bool) -> None:
    """One dot, equal dots, far ones, and none."""
    svg = dot_plot("Title", "ratio", {"full": values, "other": [0.8, 1.25]}, logarithmic=logarithmic)
    assert {"Title", "ratio", "full", "other"} <= texts(svg)
