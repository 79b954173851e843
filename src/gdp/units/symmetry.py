"""Devices that differ in name only: a search or a policy need not try one for the other."""

from collections import Counter

import numpy as np

from gdp.arrays import I64
from gdp.cluster import Cluster
from gdp.simulator.problem import Problem


def exchangeable_before(problem: Problem) -> I64:
    """[D] the nearest device of lower number that each one can be exchanged with, or -1."""
    before = np.full(problem.num_devices, -1)
    classes: list[list[int]] = []
    for device in range(problem.num_devices):
        for members in classes:
            if can_exchange(problem, members[0], device):
                before[device] = members[-1]
                members.append(device)
                break
        else:
            classes.append([device])
    return before


def can_exchange(problem: Problem, first: int, second: int) -> bool:
    """Returns True if two devices can swap names without a change of costs, constraints, routes or shared channels."""
    cluster = problem.cluster
    swap = np.arange(problem.num_devices)
    swap[[first, second]] = second, first
    per_device = (problem.op_time_ns, problem.allowed, problem.memory_limit_bytes)
    per_pair = (cluster.latency_ns, cluster.bytes_per_second)
    return (
        all(np.array_equal(values[..., first], values[..., second]) for values in per_device)
        and all(np.array_equal(values, values[np.ix_(swap, swap)]) for values in per_pair)
        and _channel_uses(cluster, np.arange(problem.num_devices)) == _channel_uses(cluster, swap)
    )


def _channel_uses(cluster: Cluster, names: I64) -> Counter[frozenset[tuple[int, int]]]:
    """Counts the channels of each set of routes, once devices are renamed."""
    uses: list[set[tuple[int, int]]] = [set() for _ in cluster.channels]
    for source, row in enumerate(cluster.route_channels):
        for target, channels in enumerate(row):
            for channel in channels:
                uses[channel].add((int(names[source]), int(names[target])))
    return Counter(map(frozenset, uses))
