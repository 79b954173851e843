"""The memory of a forked process: what a step frees stays with the process, for the next step."""

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of glibc's malloc.h
_MAX_BYTES = (1 << 31) - 1


def keep_freed_memory() -> None:
    """Keeps glibc from giving memory back to the system, which would map it anew, page by page, in each step."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other libraries have none
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, _MAX_BYTES)
        mallopt(_MMAP_THRESHOLD, _MAX_BYTES)
