"""Devices that differ in name only: a search or a policy need not try one for the other."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gdp.arrays import I64
from gdp.cluster import Cluster
from gdp.simulator.problem import Problem


def exchange_classes(problem: Problem, most: float = math.inf) -> list[list[int]]:
    """Returns the devices in classes of those that can be exchanged, ascending. A device that would raise the number of
    ways to exchange all above `most` has a class of its own."""
    classes: list[list[int]] = []
    channels = _Channels.of(problem.cluster)
    for device in range(problem.num_devices):
        for members in classes:
            num_ways = math.prod(math.factorial(len(other) + (other is members)) for other in classes)
            if num_ways <= most and _can_exchange(problem, channels, members[0], device):
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


Routes = set[tuple[int, int]]
"""The sources and targets of routes."""


@dataclass(frozen=True, eq=False)
class _Channels:
    """The routes that share each channel of a cluster, and those of each device by channel."""

    routes: Sequence[Routes]
    of_device: Sequence[Mapping[int, Routes]]

    @classmethod
    def of(cls, cluster: Cluster) -> "_Channels":
        """Reads the channels of a cluster."""
        routes: list[Routes] = [set() for _ in cluster.channels]
        of_device = [defaultdict[int, Routes](set) for _ in cluster.devices]
        for source, row in enumerate(cluster.route_channels):
            for target, channels in enumerate(row):
                for channel in channels:
                    for known in (routes, of_device[source], of_device[target]):
                        known[channel].add((source, target))
        return cls(routes, of_device)

    def are_alike(self, first: int, second: int) -> bool:
        """Returns whether as many channels have each set of routes once two devices swap names."""
        swap, changed = {first: second, second: first}, list[int]()

        def renamed(routes: Routes) -> Routes:
            return {(swap.get(a, a), swap.get(b, b)) for a, b in routes}

        of_first, of_second = self.of_device[first], self.of_device[second]
        for channel in of_first.keys() | of_second.keys():
            own = of_first.get(channel, set()) | of_second.get(channel, set())  # others keep their names
            if renamed(own) != own:
                changed.append(channel)
        before, after = (
            Counter(frozenset(rename(self.routes[channel])) for channel in changed) for rename in (set, renamed)
        )
        return before == after


def _can_exchange(problem: Problem, channels: _Channels, first: int, second: int) -> bool:
    """Returns True if two devices can swap names without a change of costs, constraints, routes or shared channels."""
    cluster = problem.cluster
    swap = np.arange(problem.num_devices)
    swap[[first, second]] = second, first
    per_device = (problem.op_time_ns, problem.host_time_ns, problem.allowed, problem.memory_limit_bytes)
    per_pair = (cluster.latency_ns, cluster.bytes_per_second)
    return (
        all(np.array_equal(values[first], values[second, swap]) for values in per_pair)
        and all(np.array_equal(values[:, first], values[swap, second]) for values in per_pair)
        and all(np.array_equal(values[..., first], values[..., second]) for values in per_device)
        and channels.are_alike(first, second)
    )
