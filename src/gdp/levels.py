"""Longest paths over the ops of a graph: b-levels and tails (with `from_sources`, heads); priorities as ranks."""

import numpy as np
import numpy.typing as npt
from numba import njit

from gdp.graph import I64, Graph


def longest_paths(graph: Graph, weights: I64, *, from_sources: bool = False) -> I64:
    """[N] the heaviest path that starts at each op (or, `from_sources`, ends before it: its own weight left out)."""
    sources, targets = graph.producers[graph.edge_tensors], graph.consumers
    order = np.argsort(sources, kind="stable") if not from_sources else np.argsort(targets, kind="stable")
    if from_sources:
        return _heads(np.asarray(weights, np.int64), sources[order], targets[order])
    return _tails(np.asarray(weights, np.int64), sources[order], targets[order])


def ranks_of(priority: npt.ArrayLike) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """(rank of each op, op of each rank): highest priority first, ties to the smaller op number."""
    op_of_rank = np.argsort(-np.asarray(priority, np.int64), kind="stable").astype(np.uint32)
    rank = np.empty_like(op_of_rank)
    rank[op_of_rank] = np.arange(len(rank), dtype=np.uint32)
    return rank, op_of_rank


@njit(cache=True, nogil=True)
def _tails(weights, sources, targets):
    longest = weights.copy()
    for edge in range(
        len(sources) - 1, -1, -1
    ):  # ops are in topological order: an op's edges come after its successors'
        longest[sources[edge]] = max(longest[sources[edge]], weights[sources[edge]] + longest[targets[edge]])
    return longest


@njit(cache=True, nogil=True)
def _heads(weights, sources, targets):
    longest = np.zeros_like(weights)
    for edge in range(len(targets)):
        longest[targets[edge]] = max(longest[targets[edge]], longest[sources[edge]] + weights[sources[edge]])
    return longest
