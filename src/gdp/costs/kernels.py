"""Kernels: what an op is made of when a device runs it.

An op with shapes becomes the kernels that its rule names; the rules are in `gdp.costs.table`. Any other op is one
kernel of its FLOPs and bytes. N ops, K kernels.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gdp.arrays import F64, I64
from gdp.cluster.achieved import OF_BYTES, OF_FLOPS
from gdp.graph import Graph
from gdp.graph.fingerprint import numbered
from gdp.graph.shapes import ShapedCall, parsed_calls

CLASSES = (*OF_FLOPS, *OF_BYTES)
SIZES = 6
"""Sizes that a kernel may have."""


class Kernel(NamedTuple):
    """One kernel of an op."""

    kind: str  # of CLASSES
    flops: int
    bytes: int  # read and written in device memory
    size: tuple[int, ...] = ()  # of products: parts, m, n, k; of attention: see `gdp.costs.attention`; (): not known


class PricedOp(NamedTuple):
    """An op as rules see it."""

    kind: str
    phase: str
    dtype: str
    flops: int
    bytes: int
    calls: tuple[ShapedCall, ...]


Rule = Callable[[PricedOp], list[Kernel]]


@dataclass(frozen=True, eq=False)
class Kernels:
    """The kernels of all ops of a graph; equal ops share theirs."""

    ops: I64  # [N] the row of each op
    offsets: I64  # [R + 1] row r has the kernels offsets[r]:offsets[r + 1]
    kinds: I64  # [K] places in CLASSES
    flops: F64  # [K]
    bytes: F64  # [K]
    sizes: F64  # [K, SIZES] 0 where not known
    dtypes: tuple[str, ...]
    dtype_codes: I64  # [K] places in `dtypes`
    rules: tuple[str, ...]
    rule_codes: I64  # [K] places in `rules`

    def summed(self, values: F64) -> F64:
        """Returns the sums [N] over the kernels of each op of `values` [K]."""
        num_rows = len(self.offsets) - 1
        row = np.repeat(np.arange(num_rows), np.diff(self.offsets))
        return np.asarray(np.bincount(row, values, num_rows)[self.ops], np.float64)

    @property
    def counts(self) -> I64:
        """[N] the number of kernels of each op."""
        return np.diff(self.offsets)[self.ops]


def kernels_of(graph: Graph, rule_of: Callable[[PricedOp], tuple[str, Rule]]) -> Kernels:
    """Returns the kernels of all ops; `rule_of` returns the rule of an op with its name."""
    columns = [numbered(texts) for texts in (graph.shapes, graph.kinds, graph.dtypes, graph.phases)]
    codes = [code for _, code in columns]
    key = np.stack([*codes, graph.flops, graph.bytes_accessed])
    first, ops = _distinct(key)
    offsets, rows, names = [0], list[Kernel](), list[str]()
    dtypes = list[int]()
    for op in first.tolist():
        shapes, kind, dtype, phase = (texts[code[op]] for texts, code in columns)
        flops, num_bytes = int(graph.flops[op]), int(graph.bytes_accessed[op])
        if flops or num_bytes:
            name, rule = rule_of(priced := PricedOp(kind, phase, dtype, flops, num_bytes, parsed_calls(shapes)))
            own = rule(priced)
            rows += own
            names += [name] * len(own)
            dtypes += [int(codes[2][op])] * len(own)
        offsets.append(len(rows))
    rules, rule_codes = numbered(names)
    place = {name: number for number, name in enumerate(CLASSES)}
    sizes = np.zeros((len(rows), SIZES))
    for number, kernel in enumerate(rows):
        sizes[number, : len(kernel.size)] = kernel.size
    return Kernels(
        ops,
        np.array(offsets, np.int64),
        np.array([place[kernel.kind] for kernel in rows], np.int64),
        np.array([kernel.flops for kernel in rows], np.float64),
        np.array([kernel.bytes for kernel in rows], np.float64),
        sizes,
        tuple(columns[2][0]),
        np.array(dtypes, np.int64),
        tuple(rules),
        rule_codes,
    )


def _distinct(key: I64) -> tuple[I64, I64]:
    """Returns the first op of each distinct column of `key` [F, N], and the place [N] of each op's among them."""
    order = np.lexsort(key)
    is_new = np.ones(key.shape[1], np.bool_)
    is_new[1:] = (key[:, order[1:]] != key[:, order[:-1]]).any(axis=0)
    places = np.empty(key.shape[1], np.int64)
    places[order] = np.cumsum(is_new) - 1
    return order[is_new], places
