"""Kernels are loaded before a clock starts."""

import os
import signal
import threading
import time
from typing import Any

import pytest

from gdp.planning import warm_up
from gdp.search.ops.local_search import Island


def test_an_interrupt_while_kernels_are_loaded_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search takes Ctrl-C for the end of its budget; the one that loads kernels must not keep it to itself."""
    cycle, turn = Island.cycle, threading.Lock()

    def interrupted(self: Island, *args: Any) -> Any:
        if turn.acquire(blocking=False):  # once
            time.sleep(0.2)  # until the main thread waits for it
            os.kill(os.getpid(), signal.SIGINT)
        return cycle(self, *args)

    monkeypatch.setattr(Island, "cycle", interrupted)
    warm_up._run_kernels.cache_clear()
    with pytest.raises(KeyboardInterrupt):
        warm_up.warm_up()
