"""The benchmark of reported faults: its rows, and which answers count as right."""

import pytest

from benchmarks.reported import LISTS, Report, ReportedBenchmark, ask, reports
from gdp.errors import InputError


def _report(**settings: object) -> Report:
    return Report(**{"report": "", "severity": 3, "then": "", "asks": (), "reads": "", **settings})  # type: ignore[arg-type]


def test_every_report_has_a_command_and_one_kind_of_right_answer() -> None:
    """A report that nothing could contradict would be met by any answer."""
    asked = [report for title in LISTS for report in reports(title)]
    assert len({report.report for report in asked}) == len(asked)
    for report in asked:
        assert report.asks
        assert (report.right is None) == (report.at_least is not None or report.at_most is not None)
        assert report.wanted


def test_an_answer_is_right_within_its_share_or_its_bounds() -> None:
    """0.093 is within 10 % of 0.1 and 0.089 is not; a text is right where it has the words."""
    figure = _report(right=0.1, within=0.1)
    assert [figure.is_met(answer) for answer in (0.093, 0.089, None, "0.1")] == [True, False, False, False]
    bounded = _report(at_least=1, at_most=2)
    assert [bounded.is_met(answer) for answer in (0.5, 1, 2, 2.5)] == [False, True, True, False]
    assert _report(right="Not supported").is_met("error: not supported: x")


def test_a_report_is_asked_by_its_command() -> None:
    """The line of a kind of device that does not exist; an unknown list is refused."""
    assert "did you mean h100-sxm-80g" in str(ask(_report(asks=("devices show h100-sxm",), reads="error")))
    with pytest.raises(InputError, match="no list 'bogus'"):
        ReportedBenchmark(lists=("bogus",))
