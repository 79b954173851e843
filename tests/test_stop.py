"""Work that an interrupt cuts short, and work that it does not."""

import signal
import threading
from typing import NoReturn

import pytest

from gdp.report.progress import stop_on_interrupt
from gdp.stop import Stop, skip_on_interrupt


def interrupt(number: int = signal.SIGTERM) -> str:
    signal.raise_signal(number)
    return "done"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_cuts_work_short_that_can_be_skipped_and_stops(number: int) -> None:
    """An interrupt cuts skippable work short and sets the stop."""
    with stop_on_interrupt(has_answer=True) as stop:
        assert skip_on_interrupt(stop, lambda: interrupt(number)) is None
        assert (stop.is_set(), stop.is_skippable) == (True, False)


def test_only_the_innermost_work_is_cut_short_and_no_other_later() -> None:
    """As `timeout` does it, a second signal follows."""
    with stop_on_interrupt(has_answer=True) as stop:

        def outer() -> list[str | None]:
            return [skip_on_interrupt(stop, interrupt), interrupt()]

        assert skip_on_interrupt(stop, outer) == [None, "done"]
        assert skip_on_interrupt(stop, interrupt) == "done"


def test_without_an_answer_an_interrupt_ends_everything() -> None:
    """Without an answer, an interrupt in skippable work raises KeyboardInterrupt and does not set the stop."""
    with stop_on_interrupt(has_answer=False) as stop, pytest.raises(KeyboardInterrupt):
        skip_on_interrupt(stop, interrupt)
    assert not stop.is_set()


def test_work_that_finds_the_answer_is_not_cut_short() -> None:
    """An interrupt after work has found the answer sets the stop but lets that work finish."""
    with stop_on_interrupt(has_answer=False) as stop:

        def find() -> str:
            stop.has_answer = True
            return interrupt()

        assert skip_on_interrupt(stop, find) == "done"
        assert stop.is_set()


def test_errors_go_on_unless_an_interrupt_causes_them() -> None:
    """An error in skippable work is raised unless an interrupt caused it."""

    def fail() -> NoReturn:
        raise ImportError

    def fail_by_interrupt() -> None:
        try:
            interrupt()
        except KeyboardInterrupt:
            raise ImportError("half a module") from None

    with stop_on_interrupt(has_answer=True) as stop:
        with pytest.raises(ImportError):
            skip_on_interrupt(stop, fail)
        assert skip_on_interrupt(stop, fail_by_interrupt) is None
        assert stop.is_set()
        with pytest.raises(ImportError):  # which no interrupt causes
            skip_on_interrupt(stop, fail)


def test_signals_close_together_neither_escape_nor_wait_for_each_other() -> None:
    """The second comes in the handler of the first, or just after it."""
    for delay_s in range(2, 60):
        with stop_on_interrupt(has_answer=True) as stop:
            signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGTERM))
            signal.setitimer(signal.ITIMER_REAL, 1e-6 * delay_s)
            skip_on_interrupt(stop, interrupt)
            while signal.getitimer(signal.ITIMER_REAL)[0] > 0:
                pass
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
            assert stop.is_set()


def test_other_events_and_none_are_taken() -> None:
    """Work runs to its end with a plain event or None in place of a stop, and a new stop is not set."""
    assert not Stop(has_answer=True).is_set()
    for event in (threading.Event(), None):
        assert skip_on_interrupt(event, lambda: "done") == "done"
