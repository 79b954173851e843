"""Decorators for kernels: functions that Numba compiles.

Compilation is what the first command on a machine waits for, so kernels are written to be compiled quickly:

- They allocate nothing: working memory comes from the caller. Without Numba's reference counting (`_nrt`), each use of
  an array costs much less to compile and nothing to run.
- They copy arrays in loops: `a[:] = b` compiles the broadcasting of NumPy, with the text of its errors.
- They take few types: a kernel is compiled anew for each combination of types, and read-only arrays have their own.
- Only kernels that Python calls have a wrapper, which takes a second to compile where records of many arrays go in.

Compiled code is kept beside the modules. Numba compiles a kernel anew when its own file has changed; here when its code
has, or that of a function that it calls by its name, or a constant that these name. Fields of records that change their
order are not noticed: name a record anew then."""

import hashlib
import pickle
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

import numpy as np
from numba import njit
from numba.core.caching import IndexDataCacheFile

_OPTIONS: Any = {"cache": True, "nogil": True, "no_cfunc_wrapper": True, "_nrt": False, "error_model": "numpy"}

INLINED: Any = {name: value for name, value in _OPTIONS.items() if name != "cache"} | {
    "no_cpython_wrapper": True,
    "forceinline": True,
}  # options of a function that becomes part of its callers, as `numba.extending.overload` takes them

_UNREADABLE = (AttributeError, ImportError, EOFError, IndexError, KeyError, TypeError, ValueError, pickle.PickleError)


class SpareIndex(IndexDataCacheFile):
    """An index of Numba's cache that is empty if it cannot be read, as after an upgrade that renames a record, and if
    a function that its kernel calls has changed."""

    function: Any  # of the kernel

    @property
    def _source_stamp(self) -> frozenset[tuple[str, str]]:
        if "stamp" not in self.__dict__:  # functions that are defined further down are known only now
            self.stamp = _stamp(self.function)
        return self.stamp

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


def _stamp(function: FunctionType) -> frozenset[tuple[str, str]]:
    """Returns what the compiled code of `function` depends on: the functions of its package that it calls, directly or
    not, with digests of their code as it was imported, and names of constants with their values."""
    package = function.__module__.partition(".")[0]
    functions, parts = [function], set()
    seen = set(functions)
    for known in functions:  # which grows
        parts.add((f"{known.__module__}.{known.__qualname__}", _digest(known.__code__)))
        for name in _names_in(known.__code__):
            value = known.__globals__.get(name)
            value = getattr(value, "py_func", value)
            if isinstance(value, FunctionType) and value.__module__.partition(".")[0] == package:
                functions.extend({value} - seen)
                seen.add(value)
            elif isinstance(value, int | float | np.generic | tuple):
                parts.add((name, repr(value)))
    return frozenset(parts)


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _digest(code: CodeType) -> str:
    constants = [_digest(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts]
    text = repr((code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants))
    return hashlib.sha256(text.encode()).hexdigest()


def _compiler(**changes: bool) -> Callable[[Callable[..., Any]], Any]:
    compile = njit(**{**_OPTIONS, **changes})

    def decorate(function: Callable[..., Any]) -> Any:
        compiled = compile(function)
        index: Any = getattr(getattr(compiled, "_cache", None), "_cache_file", None)
        if type(index) is IndexDataCacheFile:  # not with NUMBA_DISABLE_JIT
            del index._source_stamp
            index.__class__ = SpareIndex
            vars(index)["function"] = function
        return compiled

    return decorate


kernel: Any = _compiler()  # compiles a function that Python calls

allocating_kernel = _compiler(_nrt=True)  # compiles a function that Python calls, and that makes arrays

inner = _compiler(no_cpython_wrapper=True)  # compiles a function that only compiled functions call

inlined = _compiler(no_cpython_wrapper=True, forceinline=True)
"""Compiles a function that becomes part of the compiled functions that call it."""

allocating_inlined = _compiler(_nrt=True, no_cpython_wrapper=True, forceinline=True)
"""Compiles a function that becomes part of the compiled functions that call it, and that adds rows of arrays."""
