"""Devices that differ in name only: a search or a policy need not try one for the other."""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from gdp.arrays import I64
from gdp.cluster import Cluster
from gdp.simulator.problem import Problem


def exchange_classes(problem: Problem, most: float = math.inf) -> list[list[int]]:
    """Returns the devices in classes of those that can be exchanged, ascending. A device that would raise the number of
    ways to exchange all above `most` has a class of its own."""
    classes: list[list[int]] = []
    for device in range(problem.num_devices):
        for members in classes:
            num_ways = math.prod(math.factorial(len(other) + (other is members)) for other in classes)
            if num_ways <= most and can_exchange(problem, members[0], device):
                members.append(device)
                break
        else:
            classes.append([device])
    return classes


def exchangeable_before(classes: Sequence[Sequence[int]]) -> I64:
    """[D] the nearest device of lower number that each one of `classes` can be exchanged with, or -1."""
    before = np.full(sum(map(len, classes)), -1)
    for members in classes:
        before[members[1:]] = members[:-1]
    return before


def can_exchange(problem: Problem, first: int, second: int) -> bool:
    """Returns True if two devices can swap names without a change of costs, constraints, routes or shared channels."""
    cluster = problem.cluster
    swap = np.arange(problem.num_devices)
    swap[[first, second]] = second, first
    per_device = (problem.op_time_ns, problem.host_time_ns, problem.allowed, problem.memory_limit_bytes)
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
