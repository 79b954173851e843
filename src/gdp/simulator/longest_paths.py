"""Longest paths over flat edges (b-levels, tails, heads), and priorities as ranks.

Ops are in topological order. N ops, E edges.
"""

import numpy as np
import numpy.typing as npt

from gdp.arrays import I64
from gdp.compiled import kernel
from gdp.graph import Graph


def longest_paths(graph: Graph, weights: I64, *, from_sources: bool = False, edge_weights: I64 | None = None) -> I64:
    """Returns the heaviest path that starts at each op [N] (or, `from_sources`, ends before it: its own weight left
    out). `weights` are those of ops [N], `edge_weights` those of the graph's edges [E], by default 0."""
    sources, targets = graph.producers[graph.edge_tensors], graph.consumers
    if from_sources:
        return longest_before(weights, sources, targets, edge_weights)
    return longest_from(weights, sources, targets, edge_weights)


def longest_from(weights: I64, sources: I64, targets: I64, edge_weights: I64 | None = None) -> I64:
    """Returns the heaviest path that starts at each op [N], its own weight included."""
    order = np.argsort(sources, kind="stable")[::-1]  # an op's edges come after its successors'
    return weights + _relaxed(weights, targets[order], sources[order], _ordered(edge_weights, order))


def longest_before(weights: I64, sources: I64, targets: I64, edge_weights: I64 | None = None) -> I64:
    """Returns the heaviest path that ends before each op [N], its own weight left out."""
    order = np.argsort(targets, kind="stable")
    return _relaxed(weights, sources[order], targets[order], _ordered(edge_weights, order))


def _ordered(edge_weights: I64 | None, order: npt.NDArray[np.intp]) -> I64:
    return np.zeros(len(order), np.int64) if edge_weights is None else edge_weights[order]


def _relaxed(weights: I64, first: I64, then: I64, edge_weights: I64) -> I64:
    paths = np.zeros(len(weights), np.int64)
    _relax(paths, np.array(weights, np.int64), first, then, edge_weights)
    return paths


@kernel
def _relax(paths, weights, first, then, edge_weights):
    for edge in range(len(first)):
        path = paths[first[edge]] + weights[first[edge]] + edge_weights[edge]
        paths[then[edge]] = max(paths[then[edge]], path)


def ranks_of(priority: npt.ArrayLike) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """Returns (rank of each op, op of each rank): highest priority first, ties to the smaller op number."""
    op_of_rank = np.argsort(-np.asarray(priority, np.int64), kind="stable").astype(np.uint32)
    rank = np.empty_like(op_of_rank)
    rank[op_of_rank] = np.arange(len(rank), dtype=np.uint32)
    return rank, op_of_rank
