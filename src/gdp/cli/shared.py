"""What the modules of the command line share: options that several commands have, printing, compiling."""

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType

OK, BAD_INPUT, NOTHING_FITS, INTERRUPTED = 0, 2, 3, 130
"""Exit statuses."""

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A built-in workload, a gdp-graph or .onnx file, hf:DIR, or package.module:function."
    ),
]
DevicesOption = Annotated[
    str,
    typer.Option(metavar="DEVICES", help="Such as 4xp100-pcie-16g or 2xl4-24g+cpu-16core, a cluster file, or local."),
]
BudgetOption = Annotated[str, typer.Option(help="A time (30s, 2m) or a number of simulations (20000sims).")]
CheckpointOption = Annotated[
    str | None, typer.Option(metavar="FILE", help="A policy of your own, for guided and learned placers.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
ThreadsOption = Annotated[int | None, typer.Option(min=1, help="Threads to search with; default: all processors.")]


def warm_up() -> None:
    """Compile, and say so where it takes long."""
    from gdp import warmup
    from gdp.report.progress import live, said_if_slow

    text = "compiling, once on a machine (up to a minute)"
    with live(text), said_if_slow(text):
        warmup.warm_up()


def show(parts: "Iterable[RenderableType]") -> None:
    """Print tables and sentences; a table is not squeezed where there is no terminal."""
    from rich.console import Console

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    with console.capture() as printed:
        for part in parts:
            console.print(part, soft_wrap=True)
    print_text("\n".join(line.rstrip() for line in printed.get().splitlines()))


def print_json(document: dict[str, Any]) -> None:
    """Print `document` as one line."""
    import orjson

    print_text(orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY).decode())


def print_text(text: str) -> None:
    """Print an answer."""
    with quiet_pipe():
        print(text, flush=True)


def log(text: str) -> None:
    """Say something that is no answer, on standard error."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def fail(message: str, status: int) -> int:
    """Say what is wrong; the exit status given."""
    log(f"gdp: {message}")
    return status


@contextlib.contextmanager
def quiet_pipe() -> Iterator[None]:
    """A reader that has gone away (`gdp ... | head -1`) is no error: the rest is printed nowhere."""
    try:
        yield
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
