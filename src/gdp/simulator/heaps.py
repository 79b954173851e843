"""Sets of devices as bits, and heaps of times, for kernels. A heap lies in two flat arrays, times and items; entry 0 is
the item with the smallest time, `size` entries are in use."""

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from gdp.compiled import inlined


@intrinsic
def trailing_zeros(typing_context, word):  # type: ignore[no-untyped-def]
    """The number of the lowest bit that is set in a uint64; 64 if none is."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.cttz(args[0], cgutils.false_bit)

    return types.uint64(types.uint64), codegen


@inlined
def push(heap_ns, heap_item, size, time_ns, item):
    """Adds `item` at `time_ns` and returns the new size; of equal times the lower item comes first."""
    at = size
    while at > 0:
        parent = (at - 1) >> 1
        if heap_ns[parent] < time_ns or (heap_ns[parent] == time_ns and heap_item[parent] < item):
            break
        heap_ns[at] = heap_ns[parent]
        heap_item[at] = heap_item[parent]
        at = parent
    heap_ns[at] = time_ns
    heap_item[at] = item
    return size + 1


@inlined
def replace_top(heap_ns, heap_item, size, time_ns, item):
    """Puts `item` at `time_ns` in the place of the first."""
    at = 0
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        if child + 1 < size and (
            heap_ns[child + 1] < heap_ns[child]
            or (heap_ns[child + 1] == heap_ns[child] and heap_item[child + 1] < heap_item[child])
        ):
            child += 1
        if heap_ns[child] > time_ns or (heap_ns[child] == time_ns and heap_item[child] > item):
            break
        heap_ns[at] = heap_ns[child]
        heap_item[at] = heap_item[child]
        at = child
    heap_ns[at] = time_ns
    heap_item[at] = item


@inlined
def pop_top(heap_ns, heap_item, size):
    """Takes the first away and returns the new size."""
    replace_top(heap_ns, heap_item, size - 1, heap_ns[size - 1], heap_item[size - 1])
    return size - 1
