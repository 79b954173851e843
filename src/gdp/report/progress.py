"""Shows the stage that runs: one live line on a terminal, now and then a line in a log; on standard error."""

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
from typing import TYPE_CHECKING, cast

from gdp.notebook import printable
from gdp.report.tables import format_ms
from gdp.stop import Stop

if TYPE_CHECKING:
    from gdp.policy.training.pretrain import TrainingProgress
    from gdp.search.place import Progress

LOG_SECONDS = 10.0  # between two lines in a log
BEGAN = time.monotonic()  # lines in a log are 10, 20, ... s after it, whatever the stage: one in ten seconds at most
_INTERRUPTED = 130  # the exit status of a program that Ctrl-C ends: 128 + SIGINT


class StatusLine:
    """Holds the text that a stage shows, and the seconds that it has left at most."""

    def __init__(self, text: str, seconds_left: float | None = None) -> None:
        self.say(text, seconds_left)

    def say(self, text: str, seconds_left: float | None = None) -> None:
        """Shows `text` from now on; `seconds_left` is None where the end is not known."""
        self._text = text
        self._end = None if seconds_left is None else time.monotonic() + seconds_left

    def __str__(self) -> str:
        if self._end is None:
            return self._text
        seconds = self._end - time.monotonic()
        if seconds <= 0:
            return f"{self._text} | time is up, the last part ends"
        return f"{self._text} | at most {f'{seconds / 60:.0f} min' if seconds > 600 else f'{seconds:.0f} s'} left"


class SearchLine(StatusLine):
    """Shows the latest progress of a search; `history` keeps all of it."""

    def __init__(self, title: str) -> None:
        super().__init__(f"placing {title}")
        self.title = title
        self.history: list[Progress] = []

    def __call__(self, progress: "Progress") -> None:
        self.history.append(progress)
        parts = [
            f"{self.title}: {format_ms(progress.step_time_ns)}{'' if progress.feasible else ' (does not fit yet)'}",
            f"bound {format_ms(progress.lower_bound_ns)}",
            f"gap {progress.step_time_ns / max(progress.lower_bound_ns, 1) - 1:.1%}",
            f"{progress.simulations:,} simulations",
        ]
        self.say(" | ".join(parts), progress.seconds_left)


def improvements(history: Sequence["Progress"]) -> list["Progress"]:
    """Returns the reports of a search with a better placement than before, and the last."""
    best: list[Progress] = []
    for report in history:
        if not best or (not report.feasible, report.step_time_ns) < (not best[-1].feasible, best[-1].step_time_ns):
            best.append(report)
    if history and best[-1] is not history[-1]:
        best.append(replace(best[-1], seconds=history[-1].seconds, simulations=history[-1].simulations))
    return best


def training_sentence(progress: "TrainingProgress") -> str:
    """Returns `update 12/500 | 1.34x the bound, best 1.21x | 100% fit | entropy 0.71`."""
    parts = [f"update {progress.update}/{progress.updates}"]
    if (last := progress.statistics) is not None:
        ratios = f"{last.step_time_ratio:.3f}x the bound, best {_ratio(last.best_step_time_ratio)}"
        parts += [ratios, f"{last.feasible:.0%} fit", f"entropy {last.entropy:.2f}"]
    return " | ".join(parts)


def _ratio(ratio: float) -> str:
    return "-" if math.isnan(ratio) else f"{ratio:.3f}x"


def live(line: StatusLine | str) -> contextlib.AbstractContextManager[None]:
    """Shows `line` during a stage: live on a terminal; elsewhere a line every ten seconds."""
    return _on_terminal(line) if sys.stderr.isatty() and os.environ.get("TERM") != "dumb" else _in_log(line)


@contextlib.contextmanager
def _on_terminal(line: StatusLine | str) -> Iterator[None]:
    from rich.console import Console
    from rich.live import Live
    from rich.spinner import Spinner
    from rich.text import Text

    console, begin = Console(stderr=True), time.monotonic()
    spinner = Spinner("dots" if console.encoding.startswith("utf") else "line")

    def shown() -> Text:
        frame = cast(Text, spinner.render(console.get_time()))
        text = f" [{time.monotonic() - begin:.0f} s] {printable(str(line))}"
        return Text.assemble(frame, text, no_wrap=True, overflow="crop")

    with Live(get_renderable=shown, console=console, refresh_per_second=8, transient=True):
        yield


@contextlib.contextmanager
def _in_log(line: StatusLine | str) -> Iterator[None]:
    is_over = threading.Event()

    def tell() -> None:
        number = int((time.monotonic() - BEGAN) / LOG_SECONDS)
        while not is_over.wait(BEGAN + (number + 1) * LOG_SECONDS - time.monotonic()):
            number = int((time.monotonic() - BEGAN) / LOG_SECONDS)  # lines that came too late are left out
            with contextlib.suppress(OSError):
                print(f"gdp: [{time.monotonic() - BEGAN:.0f} s] {printable(str(line))}", file=sys.stderr, flush=True)

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@contextlib.contextmanager
def stop_on_interrupt(note: str = "", *, has_answer: bool = True) -> Iterator[Stop]:
    """Yields an event that the first Ctrl-C or a SIGTERM sets, with a `note` in the log; a second Ctrl-C exits. They
    raise KeyboardInterrupt as long as `has_answer` of the event is false, as it is from the start here."""
    stop = Stop(has_answer=has_answer)
    previous = {int(number): signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def handle(number: int, frame: FrameType | None) -> None:
        if not stop.has_answer and callable(before := previous[number]):
            before(number, frame)
        if stop.is_set() and number == signal.SIGINT:
            os._exit(_INTERRUPTED)
        if note:
            os.write(2, f"gdp: {note}\n".encode())  # a print may be what the signal interrupts
        stop.interrupt()

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    for number in previous:
        signal.signal(number, handle)
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
