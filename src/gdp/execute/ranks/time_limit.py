"""Calls that may never return, such as those to the store of a host that cannot be reached."""

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any


def within(seconds: float, act: Callable[[], Any]) -> Any:
    """Returns the answer of `act`. RuntimeError if there is none in time: the host of a store may be gone."""
    answers: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

    def answer() -> None:
        try:
            answers.put((act(), None))
        except BaseException as error:
            answers.put((None, error))

    threading.Thread(target=answer, daemon=True).start()
    try:
        found, error = answers.get(timeout=seconds)
    except Empty:
        raise RuntimeError(f"no answer for {seconds:g} s") from None
    if error is not None:
        raise error
    return found
