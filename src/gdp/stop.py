"""Stop: the event that an interrupt sets, and work that the answer can do without, which an interrupt cuts short."""

import threading
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


class CutShortError(KeyboardInterrupt):
    """Ends work that can be skipped."""


class Stop(threading.Event):
    """Is set by an interrupt, once there is an answer that would be lost otherwise. Nobody waits for it, so it is set
    without a lock: two signals may come at once, one in the handler of the other."""

    def __init__(self, *, has_answer: bool) -> None:
        super().__init__()
        self.has_answer = has_answer
        self.is_skippable = False  # the work that the main thread does now
        self.was_cut = False  # skippable work, which happens once
        self._is_set = False

    def set(self) -> None:
        """See `threading.Event`."""
        self._is_set = True

    def is_set(self) -> bool:
        """See `threading.Event`."""
        return self._is_set

    def interrupt(self) -> None:
        """Ends the work at once where that loses no answer, by KeyboardInterrupt; else sets the event. The first
        interrupt in work that can be skipped cuts that short, too."""
        if not self.has_answer:
            raise KeyboardInterrupt
        if self._is_set:
            return
        self._is_set = True
        if self.is_skippable:
            self.was_cut = True
            raise CutShortError


def skip_on_interrupt(stop: threading.Event | None, action: Callable[[], _T]) -> _T | None:
    """Returns `action()`, which the answer can do without; None where an interrupt cuts it short, which sets `stop`. It
    runs in the main thread. While `stop` has no answer, and for events of other kinds, nothing is cut short."""
    if not isinstance(stop, Stop) or not stop.has_answer:
        return action()
    # an interrupt comes where something is called: nothing is between here and `try`, and after the action
    before, was_cut = stop.is_skippable, stop.was_cut
    try:
        stop.is_skippable = True
        return action()
    except CutShortError:
        return None
    except Exception:  # an import that is cut short may fail with an error of its own
        if stop.was_cut == was_cut:
            raise
        return None
    finally:
        stop.is_skippable = before
