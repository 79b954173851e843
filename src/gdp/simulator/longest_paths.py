"""Longest paths over flat edges (b-levels, tails, heads), priorities as ranks. N ops in topological order, E edges."""

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
        return _relaxed(weights, sources, targets, np.argsort(targets, kind="stable"), edge_weights)
    return longest_from(weights, sources, targets, edge_weights)


def longest_from(weights: I64, sources: I64, targets: I64, edge_weights: I64 | None = None) -> I64:
    """Returns the heaviest path that starts at each op [N], its own weight included."""
    order = np.argsort(sources, kind="stable")[::-1]  # an op's edges come after its successors'
    return weights + _relaxed(weights, targets, sources, order, edge_weights)


def _relaxed(weights: I64, first: I64, then: I64, order: I64, edge_weights: I64 | None) -> I64:
    """Returns the heaviest path before each op [N], over edges from `first` to `then` [E] in this order."""
    paths, edge_weights = np.zeros_like(weights), np.zeros_like(order) if edge_weights is None else edge_weights[order]
    _relax(paths, np.array(weights), first[order], then[order], edge_weights)
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
