"""Work that an interrupt cuts short, and work that it does not."""

import signal
import threading

import pytest

from gdp.report.progress import stop_on_interrupt
from gdp.stop import Stop, skippable


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_cuts_skippable_work_short_and_stops(number: int) -> None:
    done = []
    with stop_on_interrupt(has_answer=True) as stop:
        with skippable(stop):
            done.append("some of it")
            signal.raise_signal(number)
            done.append("all of it")
        assert (done, stop.is_set(), stop.is_skippable) == (["some of it"], True, False)


def test_only_the_innermost_work_is_cut_short() -> None:
    done = []
    with stop_on_interrupt(has_answer=True) as stop, skippable(stop):
        with skippable(stop):
            signal.raise_signal(signal.SIGTERM)
        done.append("the rest")
    assert done == ["the rest"]


def test_without_an_answer_an_interrupt_ends_everything() -> None:
    with stop_on_interrupt(has_answer=False) as stop, pytest.raises(KeyboardInterrupt), skippable(stop):
        signal.raise_signal(signal.SIGTERM)
    assert not stop.is_set()


def test_work_that_finds_the_answer_is_not_cut_short() -> None:
    with stop_on_interrupt(has_answer=False) as stop, skippable(stop):
        stop.has_answer = True
        signal.raise_signal(signal.SIGTERM)
        assert stop.is_set()


def test_errors_go_on_unless_an_interrupt_causes_them() -> None:
    with stop_on_interrupt(has_answer=True) as stop:
        with pytest.raises(ImportError), skippable(stop):
            raise ImportError
        with skippable(stop):
            try:
                signal.raise_signal(signal.SIGTERM)
            except KeyboardInterrupt:
                raise ImportError("half a module") from None
        assert stop.is_set()


def test_other_events_and_none_are_taken() -> None:
    assert not Stop(has_answer=True).is_set()
    for event in (threading.Event(), None):
        with pytest.raises(ValueError, match="own"), skippable(event):
            raise ValueError("own")
