"""The lower bound: valid against every placement and order, and equal to the optimum where it should be."""

import random
from collections.abc import Sequence
from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdp.bounds.lower_bound import lower_bound, quick_bound
from gdp.cluster import Cluster, Device, Route
from gdp.graph import Graph, Op, Tensor
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import evaluate_many, simulate
from strategies import Instance, instances

Times = Sequence[Sequence[int]]
Edge = tuple[int, int, int]  # producer, consumer, bytes


def make_problem(times: Times, edges: Sequence[Edge] = (), *, latency_ns: int = 0) -> Problem:
    """Ops with these times [N][D] on devices with a route of their own for each pair, 1 byte per ns."""
    num_devices = len(times[0])
    devices = [
        Device(f"d{number}", "test-device", 2**50, {"float32": 10**9}, 10**9, 0) for number in range(num_devices)
    ]
    routes = {
        (source, target): Route(latency_ns, 10**9, (f"d{source}-d{target}",))
        for source, target in permutations(range(num_devices), 2)
    }
    tensors = [Tensor(producer, (consumer,), size) for producer, consumer, size in edges]
    graph = Graph.build("test", [Op(f"op{number}") for number in range(len(times))], tensors)
    return Problem.build(graph, Cluster.build("test", devices, routes), op_time_ns=np.array(times, np.int64))


def build(instance: Instance) -> Problem:
    return Problem.build(instance.graph, instance.cluster, op_time_ns=instance.op_time_ns)


def optimum_ns(problem: Problem) -> int:
    """The least step time of all placements with a step time, whether or not they fit."""
    choices = [np.flatnonzero(row >= 0) for row in problem.op_time_ns]
    times, _ = evaluate_many(problem, np.array(list(product(*choices)), np.int64), num_threads=1)
    return int(times.min())


def random_order(problem: Problem, placement: np.ndarray, rng: random.Random) -> list[list[int]]:
    """Each device's ops in the order of a random topological order of all ops."""
    inputs: list[set[int]] = [set() for _ in range(problem.num_ops)]
    for tensor, consumer in zip(problem.graph.edge_tensors.tolist(), problem.graph.consumers.tolist(), strict=True):
        inputs[consumer].add(int(problem.graph.producers[tensor]))
    order: list[list[int]] = [[] for _ in range(problem.num_devices)]
    left, done = list(range(problem.num_ops)), set[int]()
    while left:
        op = rng.choice([op for op in left if inputs[op] <= done])
        order[placement[op]].append(op)
        left.remove(op)
        done.add(op)
    return order


@settings(max_examples=300)
@given(instances(max_ops=6, max_devices=3))
def test_no_placement_beats_the_bound(instance: Instance) -> None:
    """The fastest of all placements of a small graph takes at least the bound."""
    problem = build(instance)
    assert max(lower_bound(problem), quick_bound(problem)) <= optimum_ns(problem)


@settings(max_examples=300)
@given(instances(num_placements=3), st.randoms(use_true_random=False))
def test_no_order_beats_the_bound(instance: Instance, rng: random.Random) -> None:
    """No priority and no replayed order is faster than the bound."""
    problem = build(instance)
    bound = lower_bound(problem)
    for priority in (None, instance.priority, [rng.randrange(5) for _ in range(problem.num_ops)]):
        assert evaluate_many(problem, instance.placements, priority=priority, num_threads=1)[0].min() >= bound
    for placement in instance.placements:
        assert simulate(problem, placement, order=random_order(problem, placement, rng)).step_time_ns >= bound


@settings(max_examples=50)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(1, 4))
def test_chain_on_equal_devices(times: list[int], num_devices: int) -> None:
    """A chain takes as long as its ops."""
    edges = [(op, op + 1, 7) for op in range(len(times) - 1)]
    assert lower_bound(make_problem([[time_ns] * num_devices for time_ns in times], edges)) == sum(times)


@settings(max_examples=50)
@given(st.integers(1, 12), st.integers(1, 5), st.integers(1, 50))
def test_equal_ops_fill_rounds(num_rounds: int, num_devices: int, time_ns: int) -> None:
    """Independent equal ops fill whole rounds."""
    problem = make_problem([[time_ns] * num_devices] * (num_rounds * num_devices))
    assert lower_bound(problem) == num_rounds * time_ns


def test_bound_is_rounded_up() -> None:
    """Shared work is rounded up to whole ns."""
    assert lower_bound(make_problem([[1] * 3] * 4)) == 2  # 4/3


def test_work_is_shared_by_speed() -> None:
    """Work is shared out in proportion to the speed of devices."""
    # 3 ops on the fast device and 2 on the slow one: 3 * 2 = 2 * 3 = 6
    assert lower_bound(make_problem([[2, 3]] * 5)) == 6


def test_ops_go_where_they_are_fast() -> None:
    """Ops go where they are relatively fast."""
    # 2 ops of [2, 9] on d0 and 2 of [9, 2] on d1
    assert lower_bound(make_problem([[2, 9], [9, 2]] * 2)) == 4


def test_op_of_one_device() -> None:
    """An op that runs on one device is no work for the other."""
    assert lower_bound(make_problem([[5, -1]] * 3)) == 15


def test_faster_devices_cost_a_transfer() -> None:
    """A faster device costs a transfer."""
    # a on d0, 1; transfer 5; b on d1, 1. Both on one device: 11
    assert lower_bound(make_problem([[1, 10], [10, 1]], [(0, 1, 5)])) == 7
    assert lower_bound(make_problem([[1, 10], [10, 1]], [(0, 1, 3)], latency_ns=2)) == 7


def test_tensors_follow_each_other() -> None:
    """Tensors from one op to another follow each other on a route."""
    assert lower_bound(make_problem([[1, -1], [-1, 1]], [(0, 1, 5), (0, 1, 6)])) == 1 + 5 + 6 + 1


@pytest.mark.parametrize(("size", "expected"), [(0, 30), (2, 32), (4, 34), (9, 39), (10, 40), (99, 40)])
def test_branches_wait_or_are_sent(size: int, expected: int) -> None:
    """Branches run one after the other unless their transfers are cheap."""
    # fork 0 -> 1, 2 -> join 3, each 10 ns. In parallel: 0 and 1 on d0, 2 and 3 on d1, so 2 starts at 10 + size and 3 at
    # 20 + size, when 1 has arrived too. In turn: 40
    problem = make_problem([[10, 10]] * 4, [(0, 1, size), (0, 2, size), (1, 3, size), (2, 3, size)])
    assert lower_bound(problem) == optimum_ns(problem) == expected


def test_branch_is_one_cluster() -> None:
    """A branch of many ops is sent at most once."""
    # 0 -> two chains of 4 ops -> 9, each 10 ns; a transfer of 39 saves nothing
    chains = [(0, 1), (1, 2), (2, 3), (3, 4), (0, 5), (5, 6), (6, 7), (7, 8), (4, 9), (8, 9)]
    problem = make_problem([[10, 10]] * 10, [(source, target, 40) for source, target in chains])
    assert lower_bound(problem) == optimum_ns(problem) == 100


def test_work_between_head_and_tail() -> None:
    """Work between a common head and a common tail counts."""
    # 0 -> 1, 2, 3, 4 -> 5: 10 + 4 * 10 / 2 + 10, where the critical path is 30 and the work by two 30
    edges = [(0, op, 0) for op in range(1, 5)] + [(op, 5, 0) for op in range(1, 5)]
    assert lower_bound(make_problem([[10, 10]] * 6, edges)) == 40


def test_large_times_do_not_overflow() -> None:
    """Times near the largest give a bound without overflow."""
    assert lower_bound(make_problem([[2**59, 2**59]] * 2, [(0, 1, 1)])) == 2**60


def test_hosts_share_their_work_at_best() -> None:
    """A device is done only when its host has issued all its ops: 3 x 7 on 2 hosts are 10.5, though ops take 1."""
    problem = make_problem([[1] * 2] * 3)
    slow = Problem.build(problem.graph, problem.cluster, op_time_ns=problem.op_time_ns, host_time_ns=np.full((3, 2), 7))
    assert (lower_bound(slow), quick_bound(slow)) == (11, 11)
