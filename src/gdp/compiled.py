"""Options of Numba that several modules share."""

from typing import Any

# For functions that only compiled code calls: what unpacks a call from Python takes a second to compile when the
# arguments are records of many arrays.
INNER: dict[str, Any] = {"cache": True, "nogil": True, "no_cpython_wrapper": True}
