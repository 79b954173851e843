"""Tensors without content that make ops wait, so that memory is overwritten only after all have read it."""

from collections.abc import Iterable, Sequence
from itertools import groupby

import numpy as np

from gdp.arrays import I64
from gdp.graph.document import Tensor


def write_after_read(num_ops: int, tensors: Sequence[Tensor], pairs: Iterable[tuple[int, int]]) -> list[Tensor]:
    """Returns a tensor of 0 bytes from each reader to its writers, for the `pairs` (reader, writer) of ops.

    Pairs that a path of `tensors` orders anyway are left out. Ops are numbered in a topological order.
    """
    counts = [len(tensor.consumers) for tensor in tensors]
    sources = np.repeat(np.array([tensor.producer for tensor in tensors], np.int64), counts)
    targets = np.array([op for tensor in tensors for op in tensor.consumers], np.int64)
    waiting = unordered(num_ops, sources, targets, pairs)
    return [
        Tensor(reader, tuple(writer for _, writer in own)) for reader, own in groupby(waiting, key=lambda pair: pair[0])
    ]


def unordered(num_ops: int, sources: I64, targets: I64, pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the `pairs` (reader, writer) of ops that no path orders anyway, distinct and sorted.

    Op `sources[i]` comes before op `targets[i]` [E]. Ops are numbered in a topological order.
    """
    pairs = list(pairs)
    bits = {writer: 1 << place for place, writer in enumerate(dict.fromkeys(writer for _, writer in pairs))}
    later = [0] * num_ops  # the writers that come after each op anyway, as bits
    order = np.argsort(-sources, kind="stable")
    for source, target in zip(sources[order].tolist(), targets[order].tolist(), strict=True):
        later[source] |= later[target] | bits.get(target, 0)
    return sorted({pair for pair in pairs if pair[0] != pair[1] and not later[pair[0]] & bits[pair[1]]})
