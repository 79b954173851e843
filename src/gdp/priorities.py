"""Priorities that know a placement: b-levels with the op times on its devices and the transfers that it makes.

The default priority of the machine model leaves transfers out, since it is the same for all placements. A plan carries
its own order, so a search may start ops by the longest remaining path of its very placement instead.
"""

import numpy as np
from numba import njit

from gdp.graph import I64
from gdp.problem import Placement, Problem


def communication_levels(problem: Problem, placement: Placement) -> I64:
    """[N] longest path from each op's start to the step's end; it has occupancy and latency where devices differ."""
    arrays = problem.arrays
    return np.asarray(
        _levels(
            np.asarray(placement, np.int64), problem.op_time_ns, arrays.tensor_offsets, arrays.consumer_offsets,
            arrays.consumers, arrays.occupancy_ns, arrays.route_rate, arrays.latency_ns,
        ),
        np.int64,
    )  # fmt: skip


def longest_chain(problem: Problem, placement: Placement) -> list[int]:
    """The ops of a longest path by `communication_levels`, from its start to the end of the step."""
    levels_ns = communication_levels(problem, placement)
    graph, cluster, times_ns = problem.graph, problem.cluster, problem.op_time_ns
    offsets = np.concatenate(([0], np.cumsum(np.bincount(graph.producers, minlength=problem.num_ops))))
    op = int(np.argmax(levels_ns))
    chain = [op]
    while levels_ns[op] > times_ns[op, placement[op]]:
        here, best_ns, following = placement[op], -1, -1
        for tensor in problem.tensor_numbers[offsets[op] : offsets[op + 1]].tolist():
            for consumer in graph.consumers_of(tensor).tolist():
                there = placement[consumer]
                sent_ns = 0
                if there != here:
                    rate = int(cluster.bytes_per_second[here, there])
                    sent_ns = -(-int(graph.tensor_bytes[tensor]) * 10**9 // rate) + int(cluster.latency_ns[here, there])
                if levels_ns[consumer] + sent_ns > best_ns:
                    best_ns, following = int(levels_ns[consumer]) + sent_ns, consumer
        op = following
        chain.append(op)
    return chain


@njit(cache=True, nogil=True)
def _levels(
    placement, op_time_ns, tensor_offsets, consumer_offsets, consumers, occupancy_ns, route_rate, latency_ns
):  # fmt: skip
    levels = np.zeros(len(placement), np.int64)
    for op in range(len(placement) - 1, -1, -1):
        device = placement[op]
        below = 0
        for tensor in range(tensor_offsets[op], tensor_offsets[op + 1]):
            for index in range(consumer_offsets[tensor], consumer_offsets[tensor + 1]):
                consumer = consumers[index]
                there = placement[consumer]
                transfer = 0
                if there != device:
                    transfer = occupancy_ns[tensor, route_rate[device, there]] + latency_ns[device, there]
                below = max(below, levels[consumer] + transfer)
        levels[op] = op_time_ns[op, device] + below
    return levels
