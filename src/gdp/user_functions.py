"""The user's functions, `package.module:function`, as what builds a model; their errors as one line; where what they
print goes."""

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any

import numpy as np

from gdp.errors import InputError

if TYPE_CHECKING:
    from gdp.capture import JaxCapture

Build = Callable[[], tuple[Any, ...]]
"""Returns (module, args, kwargs)."""

PATTERN = r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*"
"""What names one."""


class JaxFunctionError(InputError):
    """A user's function gave a JAX function where a PyTorch module is needed: whoever can do with one catches this.

    What it is, is known only once it has run, and until then it has to be run as what builds a module.
    """

    def __init__(self, text: str, capture: "Callable[[], JaxCapture]") -> None:
        super().__init__(f"{text}: is a JAX function, which is placed, not executed or measured; name a PyTorch model")
        self.capture = capture


def user_function(text: str) -> Build:
    """The user's function, its answer put in order as (module, args, kwargs), its errors as one line.

    What is built may be JAX's: then building raises JaxFunctionError.
    """
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
    if iscoroutinefunction(found):
        raise InputError(f"{text}: is async; a plain function that returns (module, example_inputs) is expected")

    def build() -> tuple[Any, ...]:
        with _explained(text, "the function failed"), _importable_here():
            return _module_and_inputs(found(), text)

    return build


def _module_and_inputs(answer: Any, text: str) -> tuple[Any, ...]:
    from torch import Tensor, nn

    from gdp.capture import JaxCapture, capture_jax

    if isinstance(answer, JaxCapture):
        raise JaxFunctionError(text, lambda: answer)
    is_complete = isinstance(answer, tuple) and len(answer) in (2, 3)
    is_jax = is_complete and not isinstance(answer[0], nn.Module) and callable(answer[0]) and _has_jax(answer[1:])
    if not is_complete or not (is_jax or isinstance(answer[0], nn.Module)):
        kinds = ", ".join(type(item).__name__ for item in (answer if isinstance(answer, tuple) else (answer,)))
        raise InputError(
            f"{text}: returned {kinds}; (module, example_inputs) or (module, args, kwargs) is expected, "
            "with a PyTorch module or a function of JAX arrays"
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
        raise JaxFunctionError(text, lambda: capture_jax(answer[0], *inputs, name=text, **kwargs))
    return answer[0], tuple(inputs), dict(kwargs)


def _has_jax(inputs: Any) -> bool:
    """Whether there is an array among the leaves that JAX takes, or one that is to be, a `ShapeDtypeStruct`."""
    jax = sys.modules.get("jax")  # a function of JAX's has imported it
    if jax is None:
        return False
    kinds = (jax.Array, jax.ShapeDtypeStruct, np.ndarray)
    return any(isinstance(leaf, kinds) for leaf in jax.tree_util.tree_leaves(inputs))


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
    """The current directory comes first where modules are looked for, and is the current one afterwards: what we read
    and write is named from there."""
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        with contextlib.chdir(here):
            yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(here)
