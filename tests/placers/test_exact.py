"""Exact search equals brute force, whatever the constraints and symmetries, and says honestly when it was cut short."""

from itertools import permutations, product

import numpy as np
from hypothesis import given, settings

from gdp.bounds.lower_bound import lower_bound
from gdp.cluster import Cluster, Device, Route
from gdp.graph import Graph, Op, Tensor
from gdp.placers.exact import exact
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import evaluate_many, simulate
from strategies import FEATURES, Instance, instances


def brute_force_ns(problem: Problem) -> int | None:
    """The least step time of all placements that obey groups, allowed devices and memory."""
    units = problem.graph.group_index
    choices = [np.flatnonzero(problem.allowed[int(np.argmax(units == unit))]) for unit in range(int(units.max()) + 1)]
    placements = np.array(list(product(*choices)), np.int64)[:, units]
    times, peaks = evaluate_many(problem, placements, num_threads=1)
    fits = (peaks <= problem.memory_limit_bytes).all(axis=1)
    return int(times[fits].min()) if fits.any() else None


def equal_devices(num_devices: int, memory_bytes: int = 2**50) -> Cluster:
    """Devices that differ in name only; each has one channel out and one channel in."""
    devices = [
        Device(f"d{number}", "test-device", memory_bytes, {"float32": 10**9}, 10**9, 0) for number in range(num_devices)
    ]
    routes = {
        (source, target): Route(1, 10**9, (f"d{source}.out", f"d{target}.in"))
        for source, target in permutations(range(num_devices), 2)
    }
    return Cluster.build("test", devices, routes)


def assert_exact(problem: Problem) -> None:
    result = exact(problem)
    assert result.is_optimal
    assert result.step_time_ns == brute_force_ns(problem)
    if result.placement is not None:
        simulation = simulate(problem, result.placement)
        assert simulation.feasible
        assert simulation.step_time_ns == result.step_time_ns >= lower_bound(problem)


@settings(max_examples=200)
@given(instances(max_ops=6, max_devices=3))
def test_equals_brute_force(instance: Instance) -> None:
    """The answer is the fastest of all placements, under every feature of the model."""
    assert_exact(Problem.build(instance.graph, instance.cluster, op_time_ns=instance.op_time_ns))


@settings(max_examples=200)
@given(instances(max_ops=6, max_devices=4, features=set(FEATURES) - {"forbidden", "large figures"}))
def test_equals_brute_force_on_shared_channels(instance: Instance) -> None:
    """Also on equal devices that share channels."""
    num_devices = instance.cluster.num_devices
    cluster = equal_devices(num_devices, int(instance.cluster.devices[0].memory_bytes))
    op_time_ns = np.repeat(instance.op_time_ns[:, :1], num_devices, axis=1)
    assert_exact(Problem.build(instance.graph, cluster, op_time_ns=op_time_ns))


def test_exchanges_within_pairs() -> None:
    """Pairs of equal devices are exchanged only within the pair."""
    # two hosts of two devices: the network is slow, so the fastest placement keeps each of the two chains in one host
    routes = {
        (source, target): Route(0, 10**9 if source // 2 == target // 2 else 10**8, (f"{source}-{target}",))
        for source, target in permutations(range(4), 2)
    }
    cluster = Cluster.build("test", equal_devices(4).devices, routes)
    edges = [(0, 2), (1, 2), (3, 5), (4, 5)]
    graph = Graph.build("test", [Op(f"op{op}") for op in range(6)], [Tensor(u, (v,), 4) for u, v in edges])
    problem = Problem.build(graph, cluster, op_time_ns=np.full((6, 4), 10, np.int64))
    assert_exact(problem)
    assert exact(problem).step_time_ns == 24  # 10, transfer 4, 10


def fan_problem(cluster: Cluster, memory: dict[str, int] | None = None) -> Problem:
    """Op 0 of 10 ns feeds op 1 of 5, op 2 of 20 and op 3 of 25, 4 bytes each; on equally fast devices."""
    ops = [Op(f"op{op}", resident_bytes=10) for op in range(4)]
    graph = Graph.build("test", ops, [Tensor(0, (op,), 4) for op in (1, 2, 3)])
    times = np.repeat([[10], [5], [20], [25]], cluster.num_devices, axis=1)
    return Problem.build(graph, cluster, op_time_ns=times, max_memory_bytes=memory)


def test_first_served_can_matter() -> None:
    """Which of two equal devices is served first can matter."""
    # op 3 stays with op 0 until 35; op 2 must be served first, on d1: 10, transfer 4, latency 1, 20; op 1 goes to d2
    problem = fan_problem(equal_devices(3))
    assert_exact(problem)
    assert exact(problem).step_time_ns == 35


def test_unequal_limits_are_not_exchanged() -> None:
    """Devices with unequal memory limits are not exchanged."""
    problem = fan_problem(equal_devices(2), memory={"d0": 5})
    assert_exact(problem)
    assert exact(problem).step_time_ns == 60  # all on d1


def test_unequal_channels_are_not_exchanged() -> None:
    """Devices that share channels differently are not exchanged."""
    # ops 0, 1, 2 feed op 3, which stays with op 2 for its large input. The routes into d2 share a channel, so that must
    # not be there: 10, transfer 4, latency 1, 10
    routes = {
        (source, target): Route(1, 10**9, ("into d2",) if target == 2 else (f"{source}-{target}",))
        for source, target in permutations(range(3), 2)
    }
    tensors = [Tensor(op, (3,), size) for op, size in enumerate((4, 4, 100))]
    graph = Graph.build("test", [Op(f"op{op}") for op in range(4)], tensors)
    cluster = Cluster.build("test", equal_devices(3).devices, routes)
    problem = Problem.build(graph, cluster, op_time_ns=np.full((4, 3), 10, np.int64))
    assert_exact(problem)
    assert exact(problem).step_time_ns == 25


def layered_problem(memory_bytes: int = 2**50) -> Problem:
    """Four layers of four ops, each op fed by two of the layer before, on four equal devices."""
    edges = [(op, op - op % 4 + 4 + (op + shift) % 4) for op in range(12) for shift in (0, 1)]
    ops = [Op(f"op{op}", resident_bytes=10) for op in range(16)]
    graph = Graph.build("test", ops, [Tensor(source, (target,), 3) for source, target in edges])
    times = np.repeat(10 + np.arange(16) % 5, 4).reshape(16, 4)
    return Problem.build(graph, equal_devices(4, memory_bytes), op_time_ns=times)


def test_short_search_keeps_its_start() -> None:
    """A search cut short claims no optimum and keeps its start."""
    problem = layered_problem()
    start = np.arange(16) % 4
    result = exact(problem, max_nodes=2, start=start)
    assert not result.is_optimal
    assert result.step_time_ns is not None
    assert result.step_time_ns <= simulate(problem, start).step_time_ns
    assert not exact(problem, time_limit_s=0.0).is_optimal


def test_search_repeats_itself() -> None:
    """The same number of nodes gives the same answer, whatever the seed."""
    first, second = (exact(layered_problem(), seed, max_nodes=300) for seed in (0, 1))
    assert first.placement is not None
    assert second.placement is not None
    assert first.placement.tolist() == second.placement.tolist()
    assert first.num_nodes == second.num_nodes


def test_nothing_fits_is_proved() -> None:
    """That nothing fits is proved."""
    result = exact(layered_problem(memory_bytes=29))  # 16 ops of 10 bytes on 4 devices need 40
    assert result.placement is None
    assert result.step_time_ns is None
    assert result.is_optimal
