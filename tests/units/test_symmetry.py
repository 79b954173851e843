"""Devices that can be exchanged."""

from collections import Counter
from itertools import combinations

import numpy as np
import pytest

from gdp.cluster import Cluster
from gdp.graph import Graph, Op, Tensor
from gdp.simulator.problem import Problem
from gdp.units.symmetry import exchange_classes

CHAIN = Graph.build("chain", [Op(f"op{n}", flops=10**9) for n in range(3)], [Tensor(n, (n + 1,), 8) for n in range(2)])


def may_swap(problem: Problem, first: int, second: int) -> bool:
    """Returns whether a problem is the same once two devices have each other's names, by its definition."""
    cluster, names = problem.cluster, [*range(problem.num_devices)]
    names[first], names[second] = second, first

    def routes(names: list[int]) -> tuple[set[object], Counter[frozenset[tuple[int, int]]]]:
        pairs = [(a, b) for a in names for b in names if a != b]
        own = {(names[a], names[b]): (cluster.latency_ns[a, b], cluster.bytes_per_second[a, b]) for a, b in pairs}
        shared: list[set[tuple[int, int]]] = [set() for _ in cluster.channels]
        for a, b in pairs:
            for channel in cluster.route_channels[a][b]:
                shared[channel].add((names[a], names[b]))
        return set(own.items()), Counter(map(frozenset, shared))

    of_devices = (problem.op_time_ns.T, problem.host_time_ns.T, problem.allowed.T, problem.memory_limit_bytes)
    is_alike = all(np.array_equal(values[first], values[second]) for values in of_devices)
    return is_alike and routes(names) == routes([*range(problem.num_devices)])


@pytest.mark.parametrize(
    "devices",
    [
        "4xp100-pcie-16g",
        "2xl4-24g+2xt4-16g+cpu-16core",
        "2x(2xa100-sxm-80g)@100gbit",
        "2x(2x(2xl4-24g)@10gbit)@5gbit",
        "3x(1xl4-24g)@10gbit",
        "8xv100-sxm-32g",
    ],
)
def test_devices_are_in_the_classes_that_the_definition_says(devices: str) -> None:
    """Two devices are in one class if and only if the problem does not change where they swap names."""
    problem = Problem.build(CHAIN, devices, max_memory_bytes={Cluster.parse(devices).devices[0].name: 2**30})
    class_of = {device: number for number, members in enumerate(exchange_classes(problem)) for device in members}
    for first, second in combinations(range(problem.num_devices), 2):
        assert (class_of[first] == class_of[second]) == may_swap(problem, first, second), (first, second)


def test_many_devices_take_a_moment() -> None:
    """Of 512 cards in hosts of eight, those of a host can be exchanged: 64 classes, for 130,000 pairs of devices."""
    problem = Problem.build(CHAIN, "4x(16x(8xa100-sxm-80g)@100gbit)@400gbit")
    assert [len(members) for members in exchange_classes(problem)] == [8] * 64
