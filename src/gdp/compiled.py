"""Decorators for kernels: functions that Numba compiles.

Compilation is what the first command on a machine waits for, so kernels are written to be compiled quickly:

- They allocate nothing: working memory comes from the caller. Without Numba's reference counting (`_nrt`), each use of
  an array costs much less to compile and nothing to run.
- They copy arrays in loops: `a[:] = b` compiles the broadcasting of NumPy, with the text of its errors.
- They take few types: a kernel is compiled anew for each combination of types, and read-only arrays have their own.
- Only kernels that Python calls have a wrapper, which takes a second to compile where records of many arrays go in.
"""

from typing import Any

from numba import njit

_OPTIONS: dict[str, Any] = {
    "cache": True,
    "nogil": True,
    "no_cfunc_wrapper": True,
    "_nrt": False,
    "error_model": "numpy",
}

kernel: Any = njit(**_OPTIONS)
"""Compiles a function that Python calls."""

allocating_kernel = njit(**{**_OPTIONS, "_nrt": True})
"""Compiles a function that Python calls, and that makes arrays."""

inner = njit(**{**_OPTIONS, "no_cpython_wrapper": True})
"""Compiles a function that only compiled functions call."""

inlined = njit(**{**_OPTIONS, "no_cpython_wrapper": True, "forceinline": True})
"""Compiles a function that becomes part of the compiled functions that call it."""

allocating_inlined = njit(**{**_OPTIONS, "_nrt": True, "no_cpython_wrapper": True, "forceinline": True})
"""Compiles a function that becomes part of the compiled functions that call it, and that adds rows of arrays."""
