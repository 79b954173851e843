"""What several compiled modules share: options of Numba, sets of devices as bits, and heaps of times.

A heap lies in two flat arrays, times and items; entry 0 is the item with the smallest time, `size` entries are in use.
"""

from typing import Any

from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

# For functions that only compiled code calls: what unpacks a call from Python takes a second to compile when the
# arguments are records of many arrays.
INNER: dict[str, Any] = {"cache": True, "nogil": True, "no_cpython_wrapper": True}


@intrinsic
def trailing_zeros(typing_context, word):  # type: ignore[no-untyped-def]
    """The number of the lowest bit that is set in a uint64; 64 if none is."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.cttz(args[0], cgutils.false_bit)

    return types.uint64(types.uint64), codegen


@njit(cache=True, inline="always")
def push(heap_ns, heap_item, size, time_ns, item):
    """Add `item` at `time_ns`; the new size."""
    at = size
    while at > 0:
        parent = (at - 1) >> 1
        if heap_ns[parent] <= time_ns:
            break
        heap_ns[at] = heap_ns[parent]
        heap_item[at] = heap_item[parent]
        at = parent
    heap_ns[at] = time_ns
    heap_item[at] = item
    return size + 1


@njit(cache=True, inline="always")
def replace_top(heap_ns, heap_item, size, time_ns, item):
    """Put `item` at `time_ns` in the place of the first."""
    at = 0
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        if child + 1 < size and heap_ns[child + 1] < heap_ns[child]:
            child += 1
        if heap_ns[child] >= time_ns:
            break
        heap_ns[at] = heap_ns[child]
        heap_item[at] = heap_item[child]
        at = child
    heap_ns[at] = time_ns
    heap_item[at] = item


@njit(cache=True, inline="always")
def pop_top(heap_ns, heap_item, size):
    """Take the first away; the new size."""
    replace_top(heap_ns, heap_item, size - 1, heap_ns[size - 1], heap_item[size - 1])
    return size - 1
