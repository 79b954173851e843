"""Levels of ops under a placement: longest paths of op times on their devices and transfers. N ops, E edges."""

import numpy as np

from gdp.arrays import I64, position_in
from gdp.simulator.longest_paths import longest_paths
from gdp.simulator.problem import Placement, Problem


def communication_levels(problem: Problem, placement: Placement) -> I64:
    """Returns the longest path from each op's start to the step's end [N] under `placement`: op times on its devices,
    and occupancy and latency of its transfers. The default priority of the machine model leaves transfers out, so that
    it is the same for all placements. A plan carries its own order, so a search may start ops by the longest remaining
    path of one placement instead."""
    times_ns = problem.op_time_ns[np.arange(problem.num_ops), placement]
    return longest_paths(problem.graph, times_ns, edge_weights=_transfer_times(problem, placement))


def longest_chain(problem: Problem, placement: Placement) -> list[int]:
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


def _transfer_times(problem: Problem, placement: Placement) -> I64:
    """Returns the time [E] that each edge of the graph takes between the devices of its ops; 0 on one device."""
    graph, arrays = problem.graph, problem.simulator.arrays
    position = position_in(problem.simulator.tensor_numbers, graph.num_tensors)
    here, there = placement[graph.producers[graph.edge_tensors]], placement[graph.consumers]
    occupancy_ns = arrays.occupancy_ns[position[graph.edge_tensors], arrays.route_rate[here, there]]
    return np.where(here == there, 0, occupancy_ns + arrays.latency_ns[here, there])
