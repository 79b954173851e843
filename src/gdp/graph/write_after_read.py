"""Tensors without content that make ops wait, so that memory is overwritten only after all have read it."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from gdp.graph.graph import Tensor


def write_after_read(num_ops: int, tensors: Sequence[Tensor], pairs: Iterable[tuple[int, int]]) -> list[Tensor]:
    """Returns a tensor of 0 bytes from each reader to its writers, for the `pairs` (reader, writer) of ops.

    Pairs that a path of `tensors` orders anyway are left out. Ops are numbered in a topological order.
    """
    pairs = list(pairs)
    bits = {writer: 1 << place for place, writer in enumerate(dict.fromkeys(writer for _, writer in pairs))}
    targets: list[list[int]] = [[] for _ in range(num_ops)]
    for tensor in tensors:
        targets[tensor.producer].extend(tensor.consumers)
    later = [0] * num_ops  # the writers that come after each op anyway, as bits
    for op in range(num_ops - 1, -1, -1):
        for target in targets[op]:
            later[op] |= later[target] | bits.get(target, 0)
    writers: dict[int, set[int]] = defaultdict(set)
    for reader, writer in pairs:
        if reader != writer and not later[reader] & bits[writer]:
            writers[reader].add(writer)
    return [Tensor(reader, tuple(sorted(writers[reader]))) for reader in sorted(writers)]
