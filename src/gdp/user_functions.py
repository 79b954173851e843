"""The user's functions, `package.module:function`, as what builds a model; their errors as one line; where what they
print goes."""

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any

from gdp.errors import InputError

Build = Callable[[], tuple[Any, ...]]
"""Returns (module, args, kwargs)."""

PATTERN = r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*"
"""What names one."""


def user_function(text: str) -> Build:
    """The user's function, its answer put in order as (module, args, kwargs), its errors as one line."""
    module_name, _, path = text.partition(":")
    with _explained(text, f"module {module_name} cannot be imported"), _importable_here():
        found: Any = import_module(module_name)
    for name in path.split("."):
        if not hasattr(found, name):
            raise InputError(f"{text}: module {module_name} has no {path}; check the name")
        found = getattr(found, name)
    if not callable(found):
        kind = type(found).__name__
        raise InputError(f"{text}: is no function but {kind}; one that returns (module, example_inputs) is expected")

    def build() -> tuple[Any, ...]:
        with _explained(text, "the function failed"), _importable_here():
            return _module_and_inputs(found(), text)

    return build


def _module_and_inputs(answer: Any, text: str) -> tuple[Any, ...]:
    from torch import Tensor, nn

    if not isinstance(answer, tuple) or len(answer) not in (2, 3) or not isinstance(answer[0], nn.Module):
        kinds = ", ".join(type(item).__name__ for item in (answer if isinstance(answer, tuple) else (answer,)))
        raise InputError(f"{text}: returned {kinds}; (module, example_inputs) or (module, args, kwargs) is expected")
    inputs, kwargs = answer[1], answer[2] if len(answer) == 3 else {}
    if len(answer) == 2 and isinstance(inputs, Mapping):
        return answer[0], (), dict(inputs)
    if isinstance(inputs, Tensor):
        inputs = (inputs,)
    if not isinstance(inputs, tuple | list) or not isinstance(kwargs, Mapping):
        raise InputError(
            f"{text}: inputs are {type(inputs).__name__} and {type(kwargs).__name__}; "
            "a tensor, a tuple or a dict of keyword inputs is expected"
        )
    return answer[0], tuple(inputs), dict(kwargs)


@contextlib.contextmanager
def _explained(text: str, what: str) -> Iterator[None]:
    """Whatever the user's code raises as one line with the last line of the exception."""
    try:
        with printing_to_stderr():
            yield
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        if type(error).__module__ == "torch._subclasses.fake_tensor":
            raise  # the capture knows what to do about these
        lines = str(error).strip().splitlines()
        reason = f"{type(error).__name__}: {lines[-1][:200]}" if lines else type(error).__name__
        raise InputError(f"{text}: {what} ({reason}); run it by itself to see more") from error


@contextlib.contextmanager
def printing_to_stderr() -> Iterator[None]:
    """What code that is not ours prints is no part of our answer: from Python, from C, or from a program it runs, all
    that goes to standard output meanwhile goes to standard error. Of the whole process, so not for two threads at once.
    """
    with contextlib.ExitStack() as undo:
        with contextlib.suppress(OSError):  # closed (`>&-`): nothing can be printed there
            kept = os.dup(1)
            undo.callback(os.close, kept)
            _flush()
            os.dup2(2, 1)
            undo.callback(os.dup2, kept, 1)
            undo.callback(_flush)
        undo.enter_context(contextlib.redirect_stdout(sys.stderr))
        yield


def _flush() -> None:
    """Python's standard output and C's, which have buffers of their own."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # gone away, closed, none
        sys.stdout.flush()
    with contextlib.suppress(OSError, TypeError, AttributeError):  # no C library to find by no name: Windows
        ctypes.CDLL(None).fflush(None)


@contextlib.contextmanager
def _importable_here() -> Iterator[None]:
    """The current directory comes first where modules are looked for."""
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(here)
