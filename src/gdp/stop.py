"""Stop: the event that an interrupt sets, and work that the answer can do without, which an interrupt cuts short."""

import contextlib
import threading
from collections.abc import Iterator


class CutShortError(KeyboardInterrupt):
    """Ends `skippable` work."""


class Stop(threading.Event):
    """Is set by an interrupt, once there is an answer that would be lost otherwise."""

    def __init__(self, *, has_answer: bool) -> None:
        super().__init__()
        self.has_answer = has_answer
        self.is_skippable = False  # the work that the main thread does now
        self.was_cut = False

    def interrupt(self) -> None:
        """Ends the work at once where that loses no answer, by KeyboardInterrupt; else sets the event."""
        if self.is_skippable:
            self.was_cut = True
            raise CutShortError
        if not self.has_answer:
            raise KeyboardInterrupt
        self.set()


@contextlib.contextmanager
def skippable(stop: threading.Event | None) -> Iterator[None]:
    """Does work of the main thread that an answer, which is there already, can do without.

    An interrupt ends it at once and sets `stop`; nothing is raised. Other events than a `Stop` do not end it.
    """
    if not isinstance(stop, Stop) or not stop.has_answer:
        yield
        return
    before = stop.is_skippable
    try:
        stop.is_skippable = True
        yield
    except CutShortError:
        stop.set()
    except Exception:  # an import that is cut short may fail with an error of its own
        if not stop.was_cut:
            raise
        stop.set()
    finally:
        stop.is_skippable = before
