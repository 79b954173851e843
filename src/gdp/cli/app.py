"""Runs `gdp`: gathers its commands, and turns errors and interrupts into an exit status. Exit status: 0 done, 1 a run
failed, 2 bad input, 3 nothing fits, 130 interrupted."""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import Annotated, Any

import typer

from gdp.cli.compare import compare
from gdp.cli.devices import devices_app
from gdp.cli.export import export
from gdp.cli.models import capture, costs, workloads
from gdp.cli.options import GroupedCommand
from gdp.cli.place import place
from gdp.cli.report import report
from gdp.cli.run import run
from gdp.cli.shared import BAD_INPUT, INTERRUPTED, OK, fail, log, print_text, quiet_pipe
from gdp.cli.simulate import simulate
from gdp.cli.times import times_app
from gdp.cli.train import train
from gdp.cli.tune import tune
from gdp.errors import InputError
from gdp.stop import CutShortError

_TRACEBACK = "--traceback"
_REPEATED_S = 0.01  # after which the callback is over

_HELP = "Place the operators of a neural network on devices so that one step is as fast as possible within memory."
_PLAIN: Any = {"add_completion": False, "pretty_exceptions_enable": False, "rich_markup_mode": None}
app = typer.Typer(help=_HELP, no_args_is_help=False, **_PLAIN)
app.add_typer(devices_app, name="devices")
app.add_typer(times_app, name="times")
for command in (place, tune, run, export, report, compare, simulate, costs, capture, train, workloads):
    app.command(cls=GroupedCommand if command in (place, compare, tune) else None)(command)


def main(args: Sequence[str] | None = None, commands: typer.Typer = app, name: str = "gdp") -> int:
    """Runs the command line `args` (default: the process's own) of `commands` and returns the exit status. A SIGTERM,
    as batch systems and `timeout` send it, is like Ctrl-C. `--traceback` may stand anywhere."""
    words = list(sys.argv[1:] if args is None else args)
    shows_traceback = _TRACEBACK in words
    words = [word for word in words if word != _TRACEBACK]
    is_alone = args is None and "TORCHELASTIC_RUN_ID" not in os.environ  # processes of torchrun have their own handlers
    interrupts: list[int] = []

    def interrupt(number: int, _frame: FrameType | None) -> None:
        interrupts.append(number)
        raise KeyboardInterrupt

    if is_alone:
        signal.signal(signal.SIGTERM, interrupt)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell's background job ignores it
            signal.signal(signal.SIGINT, interrupt)
        sys.unraisablehook = repeat_interrupt
    try:
        status = int(commands(words, prog_name=name, standalone_mode=False) or OK)
        with quiet_pipe():
            sys.stdout.flush()
    except (InputError, typer.TyperException) as error:
        if shows_traceback:
            _log_traceback(error)
        message = error.format_message() if isinstance(error, typer.TyperException) else str(error)
        status = fail(f"error: {' '.join(message.split())}", BAD_INPUT)
    except MemoryError:
        status = fail("error: not enough memory; give a smaller model or file, or a machine with more", BAD_INPUT)
    except (KeyboardInterrupt, typer.Abort):
        status = INTERRUPTED
    except Exception as error:
        if not interrupts:
            raise
        if shows_traceback:
            _log_traceback(error)
        status = INTERRUPTED  # an import that an interrupt cuts short may fail with an error of its own
    if is_alone or (args is None and status == INTERRUPTED):
        for number in (signal.SIGINT, signal.SIGTERM):  # the answer is out, and a second one changes nothing
            signal.signal(number, signal.SIG_IGN)
    if status == INTERRUPTED:
        fail("interrupted", INTERRUPTED)
    return status


def _log_traceback(error: Exception) -> None:
    log("".join(traceback.format_exception(error)).rstrip())


def repeat_interrupt(unraisable: "sys.UnraisableHookArgs") -> None:
    """Repeats a Ctrl-C that came in a callback of compiled code, as when kernels are loaded, which Python ignores. One
    that was to cut work short has stopped the search by then, and is not repeated: a second one ends the process."""
    if issubclass(unraisable.exc_type, CutShortError):
        return
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        threading.Timer(_REPEATED_S, os.kill, (os.getpid(), signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(unraisable)


@app.callback(invoke_without_command=True)
def gdp(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    _traceback: Annotated[
        bool, typer.Option(_TRACEBACK, help="Print where an error comes from; may follow any command.")
    ] = False,
) -> None:
    if version:
        from gdp import __version__

        print_text(f"gdp {__version__}")
        raise typer.Exit(OK)
    if context.invoked_subcommand is None:
        print_text(context.get_help())
        raise typer.Exit(OK)
