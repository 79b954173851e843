"""User's functions, `package.module:function`: their models, their errors in one line, and where their output goes."""

import contextlib
import ctypes
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from inspect import iscoroutinefunction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gdp.errors import InputError, user_line
from gdp.models.unsupported import unsupported

if TYPE_CHECKING:
    from gdp.models.jax import JaxCapture

Example = tuple[Any, ...]  # (module, args, kwargs) of a PyTorch model

Build = Callable[[], Example]

PATTERN = r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*"
"""The names of user's functions, as a regular expression."""


@dataclass(frozen=True, slots=True)
class JaxFunction:
    """A JAX function that a user's function returned, with its inputs."""

    capture: "Callable[[], JaxCapture]"


def named(text: str, directory: Path | None = None) -> Any:
    """Imports what `package.module:name` names, from `directory` on. InputError if it cannot be imported."""
    module_name, _, path = text.partition(":")
    if module_name.endswith(".py"):
        raise InputError(f"{text}: a module has no .py; did you mean {module_name.removesuffix('.py')}:{path}?")
    with _explained(text, f"module {module_name} cannot be imported"), _importable_in(directory):
        function: Any = import_module(module_name)
    for name in path.split("."):
        if not hasattr(function, name):
            raise InputError(f"{text}: module {module_name} has no {path}; check the name")
        function = getattr(function, name)
    return function


class UserFunction:
    """A user's function, imported; a call returns its answer in order. An answer is known to be a PyTorch model or a
    JAX function only after the call, which runs under fake tensors. InputError for a function that cannot be imported
    or called, and, by the call, for its errors."""

    def __init__(self, text: str, directory: Path | None = None) -> None:
        """Imports the function that `text` names, from `directory` on: by default the current one."""
        self._text, self._directory = text, directory
        function = named(text, directory)
        if not callable(function):
            kind, expected = type(function).__name__, "one that returns (module, example_inputs) is expected"
            raise InputError(f"{text}: is no function but {kind}; {expected}")
        if iscoroutinefunction(function):
            raise InputError(f"{text}: is async; a plain function that returns (module, example_inputs) is expected")
        self._function = function

    def __call__(self) -> Example | JaxFunction:
        """Calls the function."""
        from gdp.models.pytorch.cards import as_if_on_a_card
        from gdp.models.pytorch.shards.given_styles import styles_noted

        explained = _explained(self._text, "the function failed")
        with explained, _importable_in(self._directory), as_if_on_a_card(), styles_noted():
            return in_order(self._function(), self._text)


def in_order(answer: Any, text: str) -> Example | JaxFunction:
    """Returns a model and its inputs as (module, args, kwargs). InputError, with the MODEL `text`, for what is none."""
    from torch import Tensor, nn

    from gdp.models.jax import JaxCapture, capture_jax

    if isinstance(answer, JaxCapture):
        return JaxFunction(lambda: answer)
    is_complete = isinstance(answer, tuple) and len(answer) in (2, 3)
    is_jax = is_complete and not isinstance(answer[0], nn.Module) and callable(answer[0]) and _has_jax(answer[1:])
    if not is_complete or not callable(answer[0]) or isinstance(answer[0], type):
        kinds = ", ".join(type(item).__name__ for item in (answer if isinstance(answer, tuple) else (answer,)))
        raise InputError(
            f"{text}: returned {kinds}; (module, example_inputs) or (module, args, kwargs) is expected, "
            "with a PyTorch module, a training step, or a function of JAX arrays"
        )
    inputs, kwargs = answer[1], answer[2] if len(answer) == 3 else {}
    if len(answer) == 2 and isinstance(inputs, Mapping):
        inputs, kwargs = (), inputs
    if isinstance(inputs, Tensor) or (is_jax and not isinstance(inputs, tuple | list)):
        inputs = (inputs,)
    if not isinstance(inputs, tuple | list) or not isinstance(kwargs, Mapping):
        raise InputError(
            f"{text}: inputs are {type(inputs).__name__} and {type(kwargs).__name__}; "
            "a tensor, a tuple or a dict of keyword inputs is expected"
        )
    if is_jax:
        if taken := {"name", "parameters", "unroll_limit"} & set(kwargs):
            raise InputError(f"{text}: input {min(taken)!r} is called as an option of capture_jax; give it by position")
        return JaxFunction(lambda: capture_jax(answer[0], *inputs, name=text, **kwargs))
    return answer[0], tuple(inputs), dict(kwargs)


def _has_jax(inputs: Any) -> bool:
    """Returns whether a leaf of `inputs` is an array for JAX, or describes one (`ShapeDtypeStruct`)."""
    jax = sys.modules.get("jax")  # a user's function that uses JAX has imported it
    if jax is None:
        return False
    kinds = (jax.Array, jax.ShapeDtypeStruct, np.ndarray)
    return any(isinstance(leaf, kinds) for leaf in jax.tree_util.tree_leaves(inputs))


@contextlib.contextmanager
def _explained(text: str, failure: str) -> Iterator[None]:
    """Turns exceptions of user code into an InputError of one line: a short text, or the last line of a long one."""
    try:
        with printing_to_stderr():
            yield
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        if kind := unsupported(error):
            raise InputError(f"{text}: {kind}") from error
        if type(error).__module__ == "torch._subclasses.fake_tensor":
            raise  # the capture explains these
        lines = [line.strip() for line in str(error).strip().splitlines()] or [""]
        said = whole if len(whole := " ".join(filter(None, lines))) <= 200 else lines[-1][:200]
        reason = f"{type(error).__name__}: {said}" if said else type(error).__name__
        raise InputError(f"{text}: {failure} ({reason}{user_line(error)}); {_remedy(reason)}") from error


def _remedy(reason: str) -> str:
    if "cuda" in reason.lower():
        return (
            "it is built on the CPU: .cuda() and device='cuda' are taken as that, streams, events, generators and "
            "queries of a card are not; leave them out"
        )
    if reason.startswith("ModuleNotFoundError"):
        return "run gdp in its directory, or name that in PYTHONPATH"
    return "--traceback shows more"


@contextlib.contextmanager
def printing_to_stderr() -> Iterator[None]:
    """Redirects standard output to standard error, for code that is not ours: what it prints is no part of our answer.
    Covers Python, C and child processes. The whole process is redirected, so only one thread at a time may use it.
    PyTorch logs no traceback, besides raising, when an operator fails on fake tensors."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    with contextlib.ExitStack() as undo:
        undo.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.CRITICAL)
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
    """Flushes the buffers of Python's and of C's standard output."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # gone away, closed, none
        sys.stdout.flush()
    with contextlib.suppress(OSError, TypeError, AttributeError):  # Windows: no C library without a name
        ctypes.CDLL(None).fflush(None)


@contextlib.contextmanager
def _importable_in(directory: Path | None) -> Iterator[None]:
    """Imports from `directory` first, by default the current one, to which it comes back."""
    here = str(directory or os.getcwd())
    sys.path.insert(0, here)
    try:
        with contextlib.chdir(here):
            yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(here)
