"""Fusion: which ops `torch.compile` computes in one kernel, and what that reads and writes.

Products, convolutions and attention stay kernels of their own, and so do ops that Inductor has no lowering of. All else
is fused along tensors whose reader loops over as many elements as their maker, where no product lies between:

    mm --> add --> gelu --> dropout --> mm          one kernel: reads the product, writes what the next one reads

An op of one element after the other that one op alone reads is computed there, however often: a small gate in the
kernel that scales a large array by it.

Servers also compute products as one that read the same tensor in one module (vLLM's `QKVParallelLinear` and
`MergedColumnParallelLinear`, and their like in SGLang and TensorRT-LLM): each op is a part of it.

An op is charged for what it reads from outside of its kernel, and for what it makes that others read; the last op of a
kernel launches it. So times of ops still add up, wherever each op is placed. N ops, E (tensor, consumer) pairs."""

from dataclasses import dataclass

import numpy as np

from gdp.arrays import F64, I64, Bool, combined, connected, unique
from gdp.cluster.achieved import OF_FLOPS
from gdp.cluster.device import COMPILE, CUDA_GRAPHS
from gdp.costs.collectives import COLLECTIVE
from gdp.costs.passes import array_bytes, is_training
from gdp.costs.products import PRODUCTS, product_size
from gdp.costs.table import BATCH_NORMS, class_of
from gdp.graph import Graph
from gdp.graph.fingerprint import numbered
from gdp.graph.shapes import parsed_calls

_OWN = {*OF_FLOPS, "optimizer", COLLECTIVE}  # classes that are not fused
_INLINE = "pointwise", "transpose"  # classes whose elements can each be computed where they are read
_FALLBACKS = ("sort", "topk", "unique", "nonzero", "multinomial", "randperm", "grid_sampl", "rnn", "lstm", "gru", "fft")
_SOURCES = ("parameter", "buffer", "input")


@dataclass(frozen=True, eq=False)
class Fusion:
    """The kernels of a compiled step."""

    is_fused: Bool  # [N] the ops that become, alone or with others, a kernel of what they loop over
    region: I64  # [N] the kernel of each op
    bytes: I64  # [N] that the op's part of its kernel reads and writes
    launches: I64  # [N] 1 for the last op of each kernel, and 1 for a batch norm, whose statistics come first
    part: F64  # [N] of the product that each op is computed in; 1: by itself


def joins_ops(runtime: str, *, is_trained: bool) -> bool:
    """Returns whether steps by `runtime` compute several ops in one kernel. Servers replay forward passes from CUDA
    graphs, and have fused them."""
    return runtime == COMPILE or (runtime == CUDA_GRAPHS and not is_trained)


def fused(graph: Graph, *, with_siblings: bool = False) -> Fusion:
    """Returns the kernels of the ops of each pass; `with_siblings`, products that read the same tensor are one."""
    kinds, code = numbered(graph.kinds)
    is_fused = np.array([_is_fusible(kind) for kind in kinds], np.bool_)[code]
    is_fused &= (graph.flops > 0) | (graph.bytes_accessed > 0)
    tensors, readers = graph.edge_tensors, graph.consumers
    makers = graph.producers[tensors]
    place = np.stack([numbered(graph.phases)[1], graph.microbatches, graph.replicas, _loops(graph)])
    holds = graph.tensor_bytes[tensors] > 0  # a batch that enters where one ends is fused as that one is
    is_own = ~is_fused & ~graph.is_of_kind(*_SOURCES)
    place = np.vstack((place, _level(makers[holds], readers[holds], is_own)))
    is_inline = is_fused & np.array([class_of(kind) in _INLINE for kind in kinds], np.bool_)[code]
    place[3:] = place[3:, _computed_at(graph, is_inline, is_fused, place[:3])]
    joins = is_fused[makers] & is_fused[readers] & holds
    joins &= (place[:, makers] == place[:, readers]).all(axis=0)
    region = connected(makers[joins], readers[joins], graph.num_ops)
    last = np.zeros(graph.num_ops, np.int64)
    last[region] = np.arange(graph.num_ops)
    part = _siblings(graph, place) if with_siblings else np.ones(graph.num_ops)
    again, is_last = _read_again(graph), last[region] == np.arange(graph.num_ops)
    return Fusion(is_fused, region, _crossing(graph, region) + again, is_last + (again > 0).astype(np.int64), part)


def _siblings(graph: Graph, place: I64) -> F64:
    """Returns the part [N] that each op is of the products with weights in its module and place that read a tensor."""
    read = graph.base[graph.edge_tensors]  # of a view what it is of
    is_made = ~graph.is_of_kind(*_SOURCES)[graph.producers[read]]
    reads = [set[int]() for _ in range(graph.num_ops)]
    for tensor, reader in zip(read[is_made].tolist(), graph.consumers[is_made].tolist(), strict=True):
        reads[reader].add(tensor)
    together: dict[tuple[object, ...], list[tuple[int, int]]] = {}
    columns: dict[tuple[str, int], tuple[int, int, int, int]] = {}
    for op in np.flatnonzero(graph.is_of_kind(*(f"aten.{name}" for name in PRODUCTS))).tolist():
        call = graph.shapes[op], int(graph.flops[op])
        if call not in columns:
            calls = parsed_calls(call[0])
            columns[call] = product_size(calls[0], call[1]) if len(calls) == 1 else (0, 0, 0, 0)
        parts, rows, count, depth = columns[call]
        if parts == 1 and len(reads[op]) == 1:  # the other operand is a weight
            where = graph.modules[op].rpartition(".")[0], graph.kinds[op], rows, depth
            together.setdefault((*where, *place[[0, 1, 2, 4], op].tolist(), *reads[op]), []).append((op, count))
    part = np.ones(graph.num_ops)
    for siblings in together.values():
        total = sum(count for _, count in siblings)
        for op, count in siblings:
            part[op] = count / total
    return part


def _is_fusible(kind: str) -> bool:
    name = kind.rpartition(".")[2].lower()
    return kind not in _SOURCES and class_of(kind) not in _OWN and not any(word in name for word in _FALLBACKS)


def _loops(graph: Graph) -> I64:
    """Returns the elements [N] that each op loops over: the most that it reads or makes; of an op without shapes, the
    bytes of what it makes, below 0."""
    texts, code = numbered(graph.shapes)
    arrays = [[array for call in parsed_calls(text) for array in (*call.arrays, *call.results)] for text in texts]
    known = np.array([max((array.num_elements for array in each), default=-1) for each in arrays], np.int64)[code]
    made = combined(np.maximum, graph.producers, graph.tensor_bytes, graph.num_ops)
    return np.where(known < 0, -1 - made, known)


def _level(makers: I64, readers: I64, is_own: Bool) -> I64:
    """Returns the most kernels of their own [N] that a path to each op passes, the op included."""
    order = np.argsort(makers, kind="stable")  # ops are numbered in a topological order
    steps = is_own.astype(np.int64).tolist()
    level = list(steps)
    for maker, reader in zip(makers[order].tolist(), readers[order].tolist(), strict=True):
        level[reader] = max(level[reader], level[maker] + steps[reader])
    return np.array(level, np.int64)


def _computed_at(graph: Graph, is_inline: Bool, is_fused: Bool, of_pass: I64) -> I64:
    """Returns the op [N] at which each op is computed: the only reader of its result, where both are of one pass, or of
    what it is computed at itself; else the op."""
    makers, readers = graph.producers[graph.edge_tensors], graph.consumers
    is_inline = is_inline & (np.bincount(makers, minlength=graph.num_ops) == 1)
    is_inline[graph.producers[graph.is_kept]] = False
    found = is_inline[makers] & is_fused[readers] & (of_pass[:, makers] == of_pass[:, readers]).all(axis=0)
    computed_at = np.arange(graph.num_ops)
    computed_at[makers[found]] = readers[found]
    while (computed_at != (computed_at := computed_at[computed_at])).any():
        pass
    return computed_at


def _read_again(graph: Graph) -> I64:
    """Returns the bytes [N] that batch norms in training read after their statistics: the batch, and its gradient."""
    texts, code = numbered(graph.shapes)
    found = [0] * len(texts)
    for place, text in enumerate(texts):
        for call in parsed_calls(text)[:1]:
            name, num_bytes = call.kind.removeprefix("aten."), sum(map(array_bytes, call.results[:1]))
            if name == "native_batch_norm_backward":
                found[place] = 2 * num_bytes
            elif name in BATCH_NORMS and is_training(call):
                found[place] = num_bytes
    return np.array(found, np.int64)[code]


def _crossing(graph: Graph, region: I64) -> I64:
    """Returns the bytes [N] of tensors that enter a kernel, at the first op that reads each there, or leave it. An op
    that takes rows of a table, or writes some of a cache, moves no more than by itself."""
    tensors, readers = graph.edge_tensors, graph.consumers
    enters = region[graph.producers[tensors]] != region[readers]
    key = tensors[enters] * (int(region.max()) + 1) + region[readers[enters]]
    first = np.flatnonzero(enters)[np.unique(key, return_index=True)[1]]
    leaves = graph.is_kept | (np.diff(graph.consumer_offsets) == 0)
    leaves[tensors[enters]] = True
    leaves = unique(graph.base[leaves])  # a part is written with its whole
    num_bytes = combined(np.add, readers[first], graph.tensor_bytes[tensors[first]], graph.num_ops)
    np.add.at(num_bytes, graph.producers[leaves], graph.tensor_bytes[leaves])
    return np.minimum(num_bytes, graph.bytes_accessed)
