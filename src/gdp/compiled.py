"""Decorators for kernels: functions that Numba compiles.

Compilation is what the first command on a machine waits for, so kernels are written to be compiled quickly:

- They allocate nothing: working memory comes from the caller. Without Numba's reference counting (`_nrt`), each use of
  an array costs much less to compile and nothing to run.
- They copy arrays in loops: `a[:] = b` compiles the broadcasting of NumPy, with the text of its errors.
- They take few types: a kernel is compiled anew for each combination of types, and read-only arrays have their own.
- Only kernels that Python calls have a wrapper, which takes a second to compile where records of many arrays go in.
"""

import pickle
from collections.abc import Callable
from typing import Any

from numba import njit
from numba.core.caching import IndexDataCacheFile

_OPTIONS: dict[str, Any] = {
    "cache": True,
    "nogil": True,
    "no_cfunc_wrapper": True,
    "_nrt": False,
    "error_model": "numpy",
}

INLINED: Any = {name: value for name, value in _OPTIONS.items() if name != "cache"} | {
    "no_cpython_wrapper": True,
    "forceinline": True,
}
"""Options of a function that becomes part of its callers, as `numba.extending.overload` takes them."""

_UNREADABLE = (AttributeError, ImportError, EOFError, IndexError, KeyError, TypeError, ValueError, pickle.PickleError)


class SpareIndex(IndexDataCacheFile):
    """An index of Numba's cache that is empty if it cannot be read, as after an upgrade that renames a record."""

    def _load_index(self) -> Any:
        try:
            return super()._load_index()  # type: ignore[no-untyped-call]
        except _UNREADABLE:
            return {}

    def _load_data(self, name: str) -> Any:
        try:
            return super()._load_data(name)  # type: ignore[no-untyped-call]
        except _UNREADABLE as error:
            raise OSError(f"{name}: unreadable") from error  # for Numba: not there


def _compiler(**changes: bool) -> Callable[[Callable[..., Any]], Any]:
    compile = njit(**{**_OPTIONS, **changes})

    def decorate(function: Callable[..., Any]) -> Any:
        compiled = compile(function)
        index = getattr(getattr(compiled, "_cache", None), "_cache_file", None)
        if type(index) is IndexDataCacheFile:  # not with NUMBA_DISABLE_JIT
            index.__class__ = SpareIndex
        return compiled

    return decorate


kernel: Any = _compiler()
"""Compiles a function that Python calls."""

allocating_kernel = _compiler(_nrt=True)
"""Compiles a function that Python calls, and that makes arrays."""

inner = _compiler(no_cpython_wrapper=True)
"""Compiles a function that only compiled functions call."""

inlined = _compiler(no_cpython_wrapper=True, forceinline=True)
"""Compiles a function that becomes part of the compiled functions that call it."""

allocating_inlined = _compiler(_nrt=True, no_cpython_wrapper=True, forceinline=True)
"""Compiles a function that becomes part of the compiled functions that call it, and that adds rows of arrays."""
