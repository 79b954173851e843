"""Overlap: exchanges of ranks that run beside products. Megatron-LM starts the sum of the gradients of a cut layer's
input over ranks, computes the gradients of the layer's parameters, and waits for what is left of the sum.

One op at a time takes as long: the exchange comes after the ops that it runs beside, by tensors of no bytes from them,
and takes what is left of its time then. That NCCL takes multiprocessors from them is not modelled. N ops, P pairs.

`LinearWithGradAccumulationAndAsyncCommunication` in megatron/core/tensor_parallel/layers.py."""

from dataclasses import replace
from typing import TypeVar

import numpy as np

from gdp.arrays import F64, I64
from gdp.costs.collectives import COLLECTIVE
from gdp.costs.table import class_of
from gdp.graph import Graph
from gdp.graph.builder import with_controls
from gdp.graph.copies import RECOMPUTED

Times = TypeVar("Times", I64, F64)
_SUMS = f"{COLLECTIVE}.all_reduce", f"{COLLECTIVE}.reduce_scatter"
_PASSED = "pointwise", "transpose"  # classes of ops that add up gradients or move them
_OF_PARAMETERS = "product", "reduction"  # of ops that make gradients of weights and biases


def overlapped(graph: Graph) -> Graph:
    """Returns a captured step in which sums of gradients over ranks run beside what makes gradients of parameters.
    Beside the sum of the results of products with weights are the ops that read the gradients that these read."""
    is_backward, classes = graph.is_in_phase("backward"), [class_of(kind) for kind in graph.kinds]
    by_reader = np.argsort(graph.consumers, kind="stable")
    read, first = graph.edge_tensors[by_reader], np.searchsorted(graph.consumers[by_reader], np.arange(len(graph) + 1))
    readers: dict[int, list[int]] = {}  # of each tensor and its views
    for base, reader in zip(graph.base[graph.edge_tensors].tolist(), graph.consumers.tolist(), strict=True):
        readers.setdefault(base, []).append(reader)
    pairs = set[tuple[int, int]]()
    for exchange in np.flatnonzero(is_backward & graph.is_of_kind(*_SUMS)).tolist():
        needed, gradients, waiting = {exchange}, set[int](), [exchange]
        while waiting:
            op = waiting.pop()
            tensors = read[first[op] : first[op + 1]]
            own = tensors[is_backward[graph.producers[tensors]]]
            if op == exchange or classes[op] in _PASSED:
                sources = set(graph.producers[own].tolist()) - needed
                needed |= sources
                waiting += sources
            elif classes[op] == "product" and graph.is_resident[graph.base[tensors]].any():
                gradients.update(graph.base[own].tolist())
        others = {op for gradient in gradients for op in readers[gradient] if op < exchange} - needed
        pairs |= {(op, exchange) for op in others if is_backward[op] and classes[op] in _OF_PARAMETERS}
    if not pairs:
        return graph
    beside, exchanges = np.array(sorted(pairs), np.int64).T
    groups = graph.groups.copy()  # one card's host starts and awaits the exchange, and the ops between
    groups[exchanges] = groups.max() + 1 + np.unique(exchanges, return_inverse=True)[1]
    groups[beside] = np.where(groups[beside] < 0, groups[exchanges], groups[beside])
    return with_controls(replace(graph, groups=groups), beside, exchanges)


def exposed(graph: Graph, times_ns: Times) -> Times:
    """Returns the times [N] of ops, those of exchanges without what passes while the ops beside them run."""
    if not any(kind in _SUMS for kind in set(graph.kinds)):
        return times_ns
    is_backward, empty = graph.is_in_phase("backward"), graph.tensor_bytes[graph.edge_tensors] == 0
    is_sum = is_backward & graph.is_of_kind(*_SUMS) & ~graph.is_in_role(RECOMPUTED)
    sources = graph.producers[graph.edge_tensors]
    edges = np.flatnonzero(empty & is_sum[graph.consumers] & is_backward[sources])
    hidden_ns = np.zeros_like(times_ns)
    np.add.at(hidden_ns, graph.consumers[edges], np.maximum(times_ns[sources[edges]], 0))
    return np.where(hidden_ns > 0, np.maximum(times_ns - hidden_ns, 0), times_ns)
