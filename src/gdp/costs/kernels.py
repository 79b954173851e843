"""Kernels: what an op is made of when a device runs it. An op with shapes becomes the kernels that its rule names; the
rules are in `gdp.costs.table`. Any other op is one kernel of its FLOPs and bytes. N ops, K kernels."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gdp.arrays import F64, I64, scattered
from gdp.cluster.achieved import OF_BYTES, OF_FLOPS
from gdp.costs.collectives import COLLECTIVE
from gdp.errors import InputError
from gdp.graph import Graph
from gdp.graph.fingerprint import numbered
from gdp.graph.shapes import ShapedCall, parsed_calls

if TYPE_CHECKING:
    from gdp.costs.fusion import Fusion

CLASSES = (*OF_FLOPS, *OF_BYTES, COLLECTIVE)
SIZES = 7  # sizes that a kernel may have


class Kernel(NamedTuple):
    """One kernel of an op."""

    kind: str  # of CLASSES
    flops: int
    bytes: int  # read and written in device memory
    # of products: parts, m, n, k; of attention: see `gdp.costs.attention`; of a collective: its exchange's place in
    # KINDS, and its ranks; of a pass: thread blocks, and ns that each takes at least; (): not known
    size: tuple[int, ...] = ()
    # less than 1: the op is a part of a kernel that other ops are in; of a product `size` is then that of all of it
    launches: float = 1.0
    dtype: str = ""  # of its arithmetic; "": the op's


class PricedOp(NamedTuple):
    """An op as rules see it."""

    kind: str
    phase: str
    dtype: str
    flops: int
    bytes: int
    calls: tuple[ShapedCall, ...]
    is_compiled: bool = False  # by torch.compile: layouts are chosen, biases fused
    is_trained: bool = False  # the step has a backward pass


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
    launches: F64  # [K]
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
    def counts(self) -> F64:
        """[N] the kernels that each op launches."""
        return self.summed(self.launches)


def kernels_of(
    graph: Graph, rule_of: Callable[[PricedOp], tuple[str, Rule]], fusion: "Fusion | None" = None
) -> Kernels:
    """Returns the kernels of all ops by `rule_of` an op with its name; `fusion` tells those of a compiled step."""
    columns = [numbered(texts) for texts in (graph.shapes, graph.kinds, graph.dtypes, graph.phases)]
    codes = [code for _, code in columns]
    is_trained = "backward" in columns[3][0]
    part, bytes_accessed = np.zeros(graph.num_ops, np.int64), graph.bytes_accessed
    of_product = np.ones(graph.num_ops) if fusion is None else fusion.part
    if fusion is not None:
        part = np.where(fusion.is_fused, 1 + fusion.launches, 0)
        bytes_accessed = np.where(fusion.is_fused, fusion.bytes, bytes_accessed)
    of_fusion = [] if fusion is None else [part, numbered(of_product.tolist())[1]]
    first, ops = _distinct(np.stack([*codes, graph.flops, bytes_accessed, *of_fusion]))
    offsets, rows, names = [0], list[Kernel](), list[str]()
    dtypes = list[str]()
    for op in first.tolist():
        shapes, kind, dtype, phase = (texts[code[op]] for texts, code in columns)
        flops, num_bytes = int(graph.flops[op]), int(bytes_accessed[op])
        if flops or num_bytes:
            calls = parsed_calls(shapes)
            priced = PricedOp(kind, phase, dtype, flops, num_bytes, calls, fusion is not None, is_trained)
            name, rule = rule_of(priced)
            try:
                own = rule(priced)
            except (AssertionError, ArithmeticError, IndexError, TypeError, ValueError):  # of a file that others wrote
                raise InputError(
                    f"op {op} {graph.op_names[op]!r}: shapes {shapes[:100]!r} are not those of such a call; capture "
                    "the model again, or leave shapes out"
                ) from None
            if part[op]:
                name, main = "fused", next((each for each in own if each.kind != "transposed_copy"), own[0])
                own = [Kernel(main.kind, flops, num_bytes, launches=float(part[op] - 1))]
            elif of_product[op] < 1:
                size = (*own[0].size[:2], round(own[0].size[2] / of_product[op]), own[0].size[3])
                own[0] = own[0]._replace(size=size, launches=float(of_product[op]))
            rows += own
            names += [name] * len(own)
            dtypes += [kernel.dtype or dtype for kernel in own]
        offsets.append(len(rows))
    (rules, rule_codes), (types, dtype_codes) = numbered(names), numbered(dtypes)
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
        np.array([kernel.launches for kernel in rows], np.float64),
        tuple(types),
        dtype_codes,
        tuple(rules),
        rule_codes,
    )


def _distinct(key: I64) -> tuple[I64, I64]:
    """Returns the first op of each distinct column of `key` [F, N], and the place [N] of each op's among them."""
    order = np.lexsort(key)
    is_new = np.ones(key.shape[1], np.bool_)
    is_new[1:] = (key[:, order[1:]] != key[:, order[:-1]]).any(axis=0)
    places = scattered(order, np.cumsum(is_new) - 1, key.shape[1])
    return order[is_new], places
