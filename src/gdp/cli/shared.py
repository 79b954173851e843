"""Prints answers and messages, and compiles before a search."""

import contextlib
import io
import json
import os
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gdp.errors import InputError
from gdp.notebook import printable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from gdp.simulator.problem import Problem

OK, FAILED, BAD_INPUT, NOTHING_FITS, INTERRUPTED = 0, 1, 2, 3, 130  # exit statuses
FOUND_BEFORE = "gdp: note: found before, with the same graph, devices and options; --no-cache searches anew"

_ASCII = str.maketrans("─…▁▂▃▄▅▆▇█", "-~.:-=+*#@")  # of tables, shortened names and timelines


def warm_up(placers: Collection[str] = ("auto",), problem: "Problem | None" = None) -> float:
    """Compiles what `placers` run on `problem`, and says how far that is; without placers, what simulates. Returns the
    seconds that it took, or 0 where all came from the cache."""
    from gdp.planning import warm_up
    from gdp.report.progress import StatusLine, live

    began, compiled = time.monotonic(), False
    line = StatusLine("loading compiled code")

    def on_kernel(num_ready: int, num_kernels: int) -> None:
        nonlocal compiled
        compiled = True
        seconds = time.monotonic() - began
        line.say(f"compiling, once on a machine: {num_ready} of {num_kernels} kernels in {seconds:.0f} s")

    with live(line):
        warm_up.warm_up(placers, problem, on_kernel=on_kernel)
    return time.monotonic() - began if compiled else 0.0


def show(parts: "Iterable[RenderableType]") -> None:
    """Prints tables and sentences; a table is not squeezed where there is no terminal."""
    from rich.console import Console
    from rich.table import Table

    from gdp.report.tables import Printable, least_width

    is_terminal, printed = sys.stdout.isatty(), io.StringIO()
    plain: Any = {"width": None if is_terminal else 200, "highlight": False, "markup": False, "emoji": False}
    console = Console(file=printed, force_terminal=is_terminal, **plain)
    width = console.width
    for part in parts:
        console.width = max(least_width(part, console), width) if isinstance(part, Table) else width
        console.print(Printable(part), soft_wrap=True)
    _print("\n".join(line.rstrip() for line in printed.getvalue().split("\n")).rstrip("\n"))


def print_json(document: dict[str, Any]) -> None:
    """Prints `document` as one line."""
    import orjson

    text = orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY).decode()
    is_plain = _is_printable(text) and printable(text) == text
    _emit(text if is_plain else json.dumps(orjson.loads(text)).replace("\x7f", "\\u007f"))


def print_text(text: str) -> None:
    """Prints an answer; characters that standard output's encoding lacks as similar ones of ASCII, or escaped. Lines
    and bars are ASCII on a terminal without abilities (`TERM=dumb`) too."""
    _print(printable(text))


def _print(text: str) -> None:
    if os.environ.get("TERM") == "dumb":
        text = text.translate(_ASCII)
    if not _is_printable(text):
        encoding = sys.stdout.encoding
        text = text.translate(_ASCII).encode(encoding, "backslashreplace").decode(encoding)
    _emit(text)


def _emit(text: str) -> None:
    with quiet_pipe():
        print(text, flush=True)


def _is_printable(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def log(text: str) -> None:
    """Prints a message that is no answer, on standard error."""
    with contextlib.suppress(OSError):
        print(printable(text), file=sys.stderr, flush=True)


def fail(message: str, status: int) -> int:
    """Prints the message of an error; returns `status`."""
    log(f"gdp: {message}")
    return status


@contextlib.contextmanager
def quiet_pipe() -> Iterator[None]:
    """Makes a reader that has gone away (`gdp ... | head -1`) no error: the rest is printed nowhere.

    Raises InputError if standard output cannot be written for another reason, such as a full disk."""
    try:
        yield
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise InputError(f"standard output cannot be written ({error.strerror}); send it elsewhere") from None


def refuse_beside(option: str, others: Mapping[str, bool]) -> None:
    """Raises InputError for the first of `others` that is given, which says something else than `option`."""
    for name, is_given in others.items():
        if is_given:
            raise InputError(f"{name}: does not go with {option}; leave one of them out")


def check_writable(path: Path) -> None:
    """Raises InputError unless a file can be written to `path`, so that no search is in vain."""
    parent = path.absolute().parent
    try:
        if path.is_dir():
            raise InputError(f"{path}: is a directory; name a file")
        while not parent.exists():
            parent = parent.parent
    except OSError as error:  # a directory that may not be looked into, a name too long
        raise InputError(f"{path}: cannot be written ({error.strerror}); choose another place") from None
    if not parent.is_dir():
        raise InputError(f"{path}: cannot be written, {parent} is no directory; choose another place")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise InputError(f"{path}: cannot be written, no permission to write to {parent}; choose another place")


def check_times_file(path: Path) -> None:
    """Raises InputError if measured times cannot be stored in `path`; writes nothing."""
    from gdp.models.measured_times import MeasuredTimes

    if path.exists() and (path.is_dir() or path.stat().st_size):
        MeasuredTimes(path)
    else:
        check_writable(path)
