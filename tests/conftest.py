"""What all tests share."""

import gc
import os
import signal

import pytest
from hypothesis import settings

# one worker a core: more threads would wait for each other, most of them in the many small models of these tests
os.environ.setdefault("OMP_NUM_THREADS", "1")

# as the command does; else a third of the time to collect tests, and more of captures, goes to looking for garbage
gc.set_threshold(100_000, 50, 1000)

# a shell in the background leaves Ctrl-C ignored, and so would what tests start
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# time is that of the machine: no claim of these tests
settings.register_profile("gdp", deadline=None)
settings.load_profile("gdp")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Compile once, before several processes do so at the same time and `gdp` says that it takes long."""
    is_one_of_several = hasattr(session.config, "workerinput")
    if session.config.getoption("numprocesses", None) and not is_one_of_several:
        from gdp.planning import warm_up

        warm_up.warm_up()


@pytest.fixture(autouse=True, scope="module")
def _frozen() -> None:
    """Whatever is loaded by now is not searched for garbage anew: that took up to half of the time of captures."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prints no line for a stage that takes long: a slow machine is no claim of tests of what is printed."""
    monkeypatch.setattr("gdp.report.progress.LOG_SECONDS", 1e6)
