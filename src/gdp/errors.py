"""The exception for wrong input, and the remedy for an unknown name."""

import contextlib
import difflib
import os
import sysconfig
import traceback
from collections.abc import Iterator, Sequence


class InputError(ValueError):
    """Bad input: one line that says what is wrong, where, and the remedy.

    The command line prints it and exits with status 2; any other exception is a defect of gdp."""


class UnevenBatchError(InputError):
    """A batch that does not split into equal micro-batches."""


class WrongBatchError(InputError):
    """A dimension of the inputs that is taken for the batch, and is another one."""


def first_line(error: BaseException) -> str:
    """Returns the first line of an exception's text, at most 200 characters of it; without a text its type's name."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


def user_line(error: BaseException) -> str:
    """Returns `, vit.py line 12`: the innermost line of the user's own code that the exception passed; "" if none. Own
    code is neither in gdp, nor in the standard library or an installed package."""
    libraries = [os.path.dirname(__file__), *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = os.path.abspath(frame.filename)
        if not frame.filename.startswith("<") and not any(path.startswith(f"{where}{os.sep}") for where in libraries):
            relative = os.path.relpath(path)
            return f", {path if relative.startswith(os.pardir) else relative} line {frame.lineno}"
    return ""


@contextlib.contextmanager
def prefixed(place: object) -> Iterator[None]:
    """Puts `place`, such as a file's path, before the message of an InputError raised inside."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{place}: {error}") from None


def suggest(name: str, known: Sequence[str], most: int = 60) -> str:
    """Returns the remedy for an unknown name: near matches, else the known names, at most `most` of them."""
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if near:
        return f"did you mean {' or '.join(near)}?"
    more = f" and {len(known) - most} more" if len(known) > most else ""
    return f"known: {', '.join(known[:most])}{more}"
