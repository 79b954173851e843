"""The memory of a forked process: what a step frees stays with the process, for the next step."""

import ctypes
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MAX_ARENAS = -1, -2, -3, -8  # malloc.h of glibc
_MAX_BYTES = (1 << 31) - 1


def keep_freed_memory() -> None:
    """Keeps glibc from giving memory back to the system: it would be mapped, and filled with zeros, in each step."""
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(_TRIM_THRESHOLD, _MAX_BYTES)
            mallopt(_MMAP_THRESHOLD, _MAX_BYTES)
