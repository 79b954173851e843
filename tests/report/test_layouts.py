"""The table of layouts that were looked at."""

import pytest

from gdp.parallel.layout import Layout
from gdp.planning.layout_answer import LayoutAnswer, LayoutRow
from gdp.report.layouts import choice_report
from gdp.search.candidate import ESTIMATED, OK


def row(option: str, status: str, step_time_ns: int) -> LayoutRow:
    peaks = (2**30,) if status == OK else None
    return LayoutRow(option, Layout.parse(option), 1, status, step_time_ns, 0, peaks, "")


@pytest.mark.parametrize(("estimate_ns", "is_explained"), [(1_000_000, True), (9_000_000, False)])
def test_estimates_below_the_answer(estimate_ns: int, is_explained: bool) -> None:
    """Estimates below the answer are explained."""
    rows = (row("data=4", OK, 5_000_000), row("data=2", ESTIMATED, estimate_ns))
    shown = [str(line) for line in choice_report(LayoutAnswer(rows, 0, 0, ()), [])]
    assert any("usually takes longer" in line for line in shown) == is_explained


def test_rows_left_out() -> None:
    """Rows that the table leaves out are counted."""
    rows = (row("data=4", OK, 5), *(row(f"data=4,microbatches={count}", OK, 5 + count) for count in range(2, 20)))
    assert "and 7 more, which --json lists" in [str(line) for line in choice_report(LayoutAnswer(rows, 0, 0, ()), [])]
