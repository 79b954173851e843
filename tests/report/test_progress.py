"""Stages that take long say so: a live line on a terminal, now and then a line in a log."""

import io
import re
import signal
import sys
import time

import pytest

from gdp.report import progress
from gdp.report.progress import SearchLine, StatusLine, live, stop_on_interrupt
from gdp.search.place import Progress


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.4)
    monkeypatch.setattr(progress, "BEGAN", time.monotonic())


def test_a_short_stage_leaves_no_line_in_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    """A stage below the limit prints nothing."""
    with live("reading a"):
        pass
    assert capsys.readouterr() == ("", "")


def lines_of(line: StatusLine | str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Returns what stages shorter than the interval print, one after the other, until there is a line."""
    text, ends_s = "", time.monotonic() + 60
    while not text.endswith("\n"):
        assert time.monotonic() < ends_s
        with live(line):
            time.sleep(0.1)
        out, err = capsys.readouterr()
        assert out == ""
        text += err
    return text.splitlines()


def test_lines_of_long_stages(capsys: pytest.CaptureFixture[str]) -> None:
    """A log has the latest text once per interval since the beginning, however short the stages are."""
    line = StatusLine("reading a")
    first = lines_of(line, capsys)
    line.say("reading b", seconds_left=100)
    second = lines_of(line, capsys)
    assert len(first) + len(second) <= (time.monotonic() - progress.BEGAN) / progress.LOG_SECONDS
    assert all(re.fullmatch(r"gdp: \[\d+ s\] reading a", each) for each in first)
    assert all(re.fullmatch(r"gdp: \[\d+ s\] reading b \| at most \d+ s left", each) for each in second)


def test_an_error_ends_a_stage(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is printed after a stage that fails."""
    with pytest.raises(ValueError, match="broken"), live("reading a"):
        raise ValueError("broken")
    time.sleep(0.5)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_terminal_shows_one_line_that_goes_away(monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    """On a terminal the line is there at once, in any encoding, and erased at the end."""
    content = io.BytesIO()
    terminal = io.TextIOWrapper(content, encoding)
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    line = SearchLine("chain on 2 devices")
    with live(line):
        line(Progress(2_000_000, False, 1_000_000, 1234, 1.0, 60.0))
        time.sleep(0.3)
    shown = content.getvalue().decode(encoding)
    assert "chain on 2 devices: 2.000 ms (does not fit yet)" in shown
    assert "simulations" not in shown  # no more than one line
    assert shown.endswith("\x1b[1A\x1b[2K")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupts_before_an_answer(number: int) -> None:
    """An interrupt ends the work at once until there is an answer."""
    with stop_on_interrupt(has_answer=False) as stop:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        assert not stop.is_set()
        stop.has_answer = True
        signal.raise_signal(number)
        assert stop.is_set()
