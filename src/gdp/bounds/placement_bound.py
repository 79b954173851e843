"""A lower bound on the step time of a given placement, whatever the order of its ops: cheaper than a simulation.

The longest path with the transfers that the placement makes; on each device and each channel the work there, between
the earliest moment that any of it can start and the least that must follow it. Learned placers rank what they draw by
it before they simulate. N ops, S placements, D devices, C channels.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gdp.arrays import I64
from gdp.compiled import kernel
from gdp.simulator.engine import NEVER
from gdp.simulator.problem import Problem


def placement_bounds(problem: Problem, placements: npt.ArrayLike) -> I64:
    """Returns, for each of `placements` [S, N], a step time in ns [S] that no order of its ops can beat.

    Memory is not regarded.
    """
    arrays = problem.simulator.arrays
    batch = np.stack([problem.check_placement(placement) for placement in np.asarray(placements)])
    bounds = np.empty(len(batch), np.int64)
    scratch = _BoundScratch.of(problem)
    for index, placement in enumerate(batch):
        bounds[index] = _bound(arrays, problem.op_time_ns, placement, scratch)
    return bounds


class _BoundScratch(NamedTuple):
    """Working memory of `_bound`."""

    head_ns: I64  # [N] longest path before an op
    after_ns: I64  # [N] and after it
    load_ns: I64  # [D] work
    first_ns: I64  # [D] earliest start of any of it
    least_ns: I64  # [D] least that must follow it
    queue_ns: I64  # [C] the same of channels
    queue_first_ns: I64  # [C]
    queue_least_ns: I64  # [C]
    arrived: I64  # [D] the tensor sent there last, plus 1
    follow_ns: I64  # [D] longest path from what takes a tensor there

    @classmethod
    def of(cls, problem: Problem) -> "_BoundScratch":
        """For placements of `problem`."""
        head_ns, after_ns = np.empty((2, problem.num_ops), np.int64)
        load_ns, first_ns, least_ns, arrived, follow_ns = np.empty((5, problem.num_devices), np.int64)
        queue_ns, queue_first_ns, queue_least_ns = np.empty((3, len(problem.cluster.channels)), np.int64)
        return cls(
            head_ns,
            after_ns,
            load_ns,
            first_ns,
            least_ns,
            queue_ns,
            queue_first_ns,
            queue_least_ns,
            arrived,
            follow_ns,
        )


@kernel
def _bound(arrays, op_time_ns, placement, scratch):
    tensor_offsets, consumer_offsets, consumers, occupancy_ns, route_rate, latency_ns = arrays[2:8]
    route_offsets, route_channels = arrays[8:10]
    head_ns, after_ns, load_ns, first_ns, least_ns, queue_ns, queue_first_ns, queue_least_ns = scratch[:8]
    arrived, follow_ns = scratch[8:]
    num_ops, num_devices = op_time_ns.shape
    num_channels = len(queue_ns)
    load_ns[:] = 0
    first_ns[:] = NEVER
    least_ns[:] = NEVER
    queue_ns[:] = 0
    queue_first_ns[:] = NEVER
    queue_least_ns[:] = NEVER
    head_ns[:] = 0
    bound = 0
    for op in range(num_ops):  # in topological order
        device = placement[op]
        load_ns[device] += op_time_ns[op, device]
        first_ns[device] = min(first_ns[device], head_ns[op])
        end_ns = head_ns[op] + op_time_ns[op, device]
        for tensor in range(tensor_offsets[op], tensor_offsets[op + 1]):
            for index in range(consumer_offsets[tensor], consumer_offsets[tensor + 1]):
                consumer = consumers[index]
                there = placement[consumer]
                transfer_ns = 0
                if there != device:
                    transfer_ns = occupancy_ns[tensor, route_rate[device, there]] + latency_ns[device, there]
                head_ns[consumer] = max(head_ns[consumer], end_ns + transfer_ns)
    for op in range(num_ops - 1, -1, -1):
        device = placement[op]
        below = 0
        arrived[:] = 0
        for tensor in range(tensor_offsets[op], tensor_offsets[op + 1]):
            follow_ns[:] = 0
            for index in range(consumer_offsets[tensor], consumer_offsets[tensor + 1]):
                consumer = consumers[index]
                there = placement[consumer]
                path_ns = op_time_ns[consumer, there] + after_ns[consumer]
                follow_ns[there] = max(follow_ns[there], path_ns)
                if there == device:
                    below = max(below, path_ns)
                else:
                    arrived[there] = tensor + 1
            for there in range(num_devices):
                if there == device or arrived[there] != tensor + 1:
                    continue
                occupied_ns = occupancy_ns[tensor, route_rate[device, there]]
                path_ns = latency_ns[device, there] + follow_ns[there]
                below = max(below, occupied_ns + path_ns)
                route = device * num_devices + there
                for at in range(route_offsets[route], route_offsets[route + 1]):
                    channel = route_channels[at]
                    queue_ns[channel] += occupied_ns
                    queue_first_ns[channel] = min(queue_first_ns[channel], head_ns[op] + op_time_ns[op, device])
                    queue_least_ns[channel] = min(queue_least_ns[channel], path_ns)
        after_ns[op] = below
        least_ns[device] = min(least_ns[device], below)
        bound = max(bound, head_ns[op] + op_time_ns[op, device] + below)
    for device in range(num_devices):
        if first_ns[device] < NEVER:
            bound = max(bound, first_ns[device] + load_ns[device] + least_ns[device])
    for channel in range(num_channels):
        if queue_first_ns[channel] < NEVER:
            bound = max(bound, queue_first_ns[channel] + queue_ns[channel] + queue_least_ns[channel])
    return bound
