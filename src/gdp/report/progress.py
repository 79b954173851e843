"""What is seen while gdp works: one live line on standard error, nothing if that is no terminal."""

import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from gdp.place import Progress
from gdp.report.tables import format_ms

if TYPE_CHECKING:
    from gdp.policy.pretraining import Progress as TrainingProgress

_INTERRUPTED = 130  # the exit status of a program that Ctrl-C ends: 128 + SIGINT


class SearchLine:
    """The latest news of a search, and all before; the time left counts down between them."""

    def __init__(self, title: str) -> None:
        self.spinner = Spinner("dots", Text(title))
        self.title = title
        self.latest: tuple[Progress, float] | None = None
        self.history: list[Progress] = []

    def __call__(self, progress: Progress) -> None:
        self.history.append(progress)
        self.latest = progress, time.monotonic()

    def __rich__(self) -> Spinner:
        if self.latest is not None:
            progress, since = self.latest
            fits = "" if progress.feasible else " (does not fit yet)"
            parts = [
                f"{self.title}: {format_ms(progress.step_time_ns)}{fits}",
                f"bound {format_ms(progress.lower_bound_ns)}",
                f"gap {progress.step_time_ns / max(progress.lower_bound_ns, 1) - 1:.1%}",
                f"{progress.simulations:,} simulations",
            ]
            if progress.seconds_left is not None:
                parts.append(f"{max(progress.seconds_left - (time.monotonic() - since), 0):.0f} s left")
            self.spinner.update(text=Text(" | ".join(parts)))
        return self.spinner


def improvements(history: Sequence[Progress]) -> list[Progress]:
    """The news of a search that tell of a better placement, and the last."""
    best: list[Progress] = []
    for news in history:
        if not best or (not news.feasible, news.step_time_ns) < (not best[-1].feasible, best[-1].step_time_ns):
            best.append(news)
    if history and best[-1] is not history[-1]:
        best.append(replace(best[-1], seconds=history[-1].seconds, simulations=history[-1].simulations))
    return best


class CountdownLine:
    """What is being done, and the seconds left, at most."""

    def __init__(self) -> None:
        self.spinner = Spinner("dots")
        self.text = ""
        self.ends: float | None = None

    def say(self, text: str, seconds_left: float | None) -> None:
        """From now on `text`; None: nobody knows how long it takes."""
        self.text = text
        self.ends = None if seconds_left is None else time.monotonic() + seconds_left

    def __rich__(self) -> Spinner:
        left = "" if self.ends is None else f" | at most {max(self.ends - time.monotonic(), 0):.0f} s left"
        self.spinner.update(text=Text(f"{self.text}{left}"))
        return self.spinner


class TrainingLine:
    """The latest update of a training run."""

    def __init__(self, title: str) -> None:
        self.spinner = Spinner("dots", Text(title))
        self.title = title

    def __call__(self, progress: "TrainingProgress") -> None:
        left = "" if progress.seconds_left is None else f" | {progress.seconds_left / 60:.0f} min left"
        self.spinner.update(text=Text(f"{self.title}: {training_sentence(progress)}{left}"))

    def __rich__(self) -> Spinner:
        return self.spinner


def training_sentence(progress: "TrainingProgress") -> str:
    """Where training is: `update 12/500 | 1.34x the bound, best 1.21x | 100% fit | entropy 0.71`."""
    parts = [f"update {progress.update}/{progress.updates}"]
    if (last := progress.statistics) is not None:
        parts += [
            f"{last.step_time_ratio:.3f}x the bound, best {_ratio(last.best_step_time_ratio)}",
            f"{last.feasible:.0%} fit",
            f"entropy {last.entropy:.2f}",
        ]
    if (checked := progress.validation) is not None:
        parts.append(f"validation {_ratio(checked.step_time_ratio)}")
    return " | ".join(parts)


def _ratio(ratio: float) -> str:
    return "-" if math.isnan(ratio) else f"{ratio:.3f}x"


@contextlib.contextmanager
def live(line: Any) -> Iterator[None]:
    """Show `line` (text, or something with `__rich__`) at work, on a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    shown = Spinner("dots", Text(line)) if isinstance(line, str) else line
    with Live(get_renderable=lambda: shown, console=Console(stderr=True), refresh_per_second=8, transient=True):
        yield


@contextlib.contextmanager
def said_if_slow(text: str, seconds: float = 5.0) -> Iterator[None]:
    """Say `text` where there is no terminal to show it on, but only if it takes long."""
    timer = threading.Timer(seconds, lambda: print(f"gdp: {text}", file=sys.stderr, flush=True))
    timer.daemon = True
    if not sys.stderr.isatty():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def stop_on_interrupt(*, terminate: bool = False) -> Iterator[threading.Event]:
    """An event that the first Ctrl-C sets, or SIGTERM if `terminate`; a second Ctrl-C ends the process at once."""
    stop = threading.Event()

    def handle(number: int, _frame: FrameType | None) -> None:
        if stop.is_set() and number == signal.SIGINT:
            os._exit(_INTERRUPTED)
        stop.set()

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    numbers = (signal.SIGINT, signal.SIGTERM) if terminate else (signal.SIGINT,)
    previous = [signal.signal(number, handle) for number in numbers]
    try:
        yield stop
    finally:
        for number, handler in zip(numbers, previous, strict=True):
            signal.signal(number, handler)
