"""Longest paths over flat edges: b-levels and tails, heads, and levels that know a placement; priorities as ranks.

Ops are in topological order. N ops, E edges.
"""

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gdp.arrays import I64
from gdp.compiled import kernel
from gdp.graph import Graph

if TYPE_CHECKING:
    from gdp.simulator.problem import Placement, Problem


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


def communication_levels(problem: "Problem", placement: "Placement") -> I64:
    """Returns the longest path from each op's start to the step's end [N] under `placement`: op times on its devices,
    and occupancy and latency of the transfers that it makes.

    The default priority of the machine model leaves transfers out, since it is the same for all placements. A plan
    carries its own order, so a search may start ops by the longest remaining path of its very placement instead.
    """
    times_ns = problem.op_time_ns[np.arange(problem.num_ops), placement]
    return longest_paths(problem.graph, times_ns, edge_weights=_transfer_times(problem, placement))


def longest_chain(problem: "Problem", placement: "Placement") -> list[int]:
    """Returns the ops of a longest path by `communication_levels`, from its start to the end of the step."""
    levels_ns, sent_ns = communication_levels(problem, placement), _transfer_times(problem, placement)
    sources, targets = problem.graph.producers[problem.graph.edge_tensors], problem.graph.consumers
    order = np.argsort(sources, kind="stable")
    offsets = np.searchsorted(sources[order], np.arange(problem.num_ops + 1))
    op = int(np.argmax(levels_ns))
    chain = [op]
    while levels_ns[op] > problem.op_time_ns[op, placement[op]]:
        edges = order[offsets[op] : offsets[op + 1]]
        op = int(targets[edges[np.argmax(levels_ns[targets[edges]] + sent_ns[edges])]])
        chain.append(op)
    return chain


def _transfer_times(problem: "Problem", placement: "Placement") -> I64:
    """[E] what each edge of the graph takes between the devices of its ops; 0 on one device."""
    graph, arrays = problem.graph, problem.simulator.arrays
    position = np.empty(graph.num_tensors, np.int64)
    position[problem.simulator.tensor_numbers] = np.arange(graph.num_tensors)
    here, there = placement[graph.producers[graph.edge_tensors]], placement[graph.consumers]
    occupancy_ns = arrays.occupancy_ns[position[graph.edge_tensors], arrays.route_rate[here, there]]
    return np.where(here == there, 0, occupancy_ns + arrays.latency_ns[here, there])
