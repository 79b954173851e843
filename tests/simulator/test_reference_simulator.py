"""The reference simulator: hand cases, errors, and what must hold of every schedule."""

import pytest
from hypothesis import given, settings

from gdp.graph import Graph, Op, Tensor
from hand_cases import HAND_CASES, HandCase, make_cluster
from reference_simulator import DeadlockError, Schedule, b_levels, replay, run
from strategies import Instance, instances

FIELDS = ("op_start_ns", "op_begin_ns", "op_finish_ns", "transfers", "order", "step_time_ns", "peak_memory_bytes")


def _plain(value: object) -> object:
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("case", HAND_CASES, ids=lambda case: case.name)
def test_hand_case(case: HandCase) -> None:
    """Run, and replay of the order of that run, give the figures worked out by hand."""
    arguments = (case.graph, case.cluster, case.op_time_ns, case.placement)
    expected = {field: _plain(getattr(case, field)) for field in FIELDS}
    ran = run(*arguments, case.priority, case.host_time_ns)
    replayed = replay(*arguments, case.order, case.host_time_ns)
    assert {field: _plain(getattr(ran, field)) for field in FIELDS} == expected
    assert {field: _plain(getattr(replayed, field)) for field in FIELDS} == expected


def _graph(num_ops: int, *edges: tuple[int, int]) -> Graph:
    ops = [Op(f"op{number}") for number in range(num_ops)]
    return Graph.build("test", ops, [Tensor(producer, (consumer,)) for producer, consumer in edges])


def test_b_levels() -> None:
    """b-levels follow the longest way; an op that runs nowhere counts 0, a mean is over devices that can run it."""
    # 0 -> 1 -> 3, 0 -> 2 -> 3; m = 5, floor((2 + 3) / 2) = 2, 4, 0
    graph = _graph(4, (0, 1), (0, 2), (1, 3), (2, 3))
    assert b_levels(graph, [[5, -1], [2, 3], [4, 4], [-1, -1]]) == [9, 2, 4, 0]


def test_replay_of_another_order() -> None:
    """Replay obeys an order that no priority gives: a device waits for its next op though others are ready."""
    # d0 |   1 2|   2 is ready at 0
    # d1 |000   |
    graph, cluster = _graph(3, (0, 1)), make_cluster(2, {})
    schedule = replay(graph, cluster, [[3, 3], [1, 1], [1, 1]], [1, 0, 0], [[1, 2], [0]])
    assert (schedule.op_start_ns, schedule.step_time_ns) == ([0, 3, 4], 5)


@pytest.mark.parametrize(
    ("placement", "order"),
    [
        ([0, 0, 0, 0], [[1, 0, 2, 3], []]),  # 1 comes before its input
        ([0, 0, 0, 0], [[0, 1, 3, 2], []]),  # the same, after others have run
        ([0, 1, 1, 0], [[3, 0], [1, 2]]),  # 3 waits for 2, which comes after 1, which waits for 0, which comes after 3
    ],
)
def test_deadlock(placement: list[int], order: list[list[int]]) -> None:
    """An order in which some op can never start is an error."""
    with pytest.raises(DeadlockError):
        replay(_graph(4, (0, 1), (2, 3)), make_cluster(2, {}), [[1, 1]] * 4, placement, order)


@pytest.mark.parametrize("order", [[[0], []], [[0, 1, 1], []], [[0], [1]], [[1, 0, 2], []]])
def test_order_of_other_ops(order: list[list[int]]) -> None:
    """An order must list each device's ops once."""
    with pytest.raises(ValueError, match="does not list"):
        replay(_graph(2), make_cluster(2, {}), [[1, 1], [1, 1]], [0, 0], order)


def test_forbidden_device() -> None:
    """A placement of an op where it cannot run has no step time."""
    with pytest.raises(ValueError, match="op 1 cannot run on device 1"):
        run(_graph(2), make_cluster(2, {}), [[1, 1], [1, -1]], [0, 1])


@given(instances())
@settings(max_examples=300)
def test_runs(instance: Instance) -> None:
    """Replaying the order of a run gives the run; its devices are greedy, and its transfers needed and queued."""
    arguments = (instance.graph, instance.cluster, instance.op_time_ns, instance.placement)
    ran = run(*arguments, instance.priority, instance.host_time_ns)
    assert replay(*arguments, ran.order, instance.host_time_ns) == ran
    check_devices_are_greedy(instance, ran)
    check_transfers_are_needed_and_queue(instance, ran)


def check_devices_are_greedy(instance: Instance, ran: Schedule) -> None:
    """A device starts an op as soon as it is free and one is ready, and none that was ready before and ranks higher."""
    graph, placement = instance.graph, instance.placement.tolist()
    priority = b_levels(graph, instance.op_time_ns) if instance.priority is None else instance.priority.tolist()
    there = {(k, placement[op]): ran.op_finish_ns[op] for k, op in enumerate(graph.producers.tolist())}
    there |= {(transfer.tensor, transfer.destination): transfer.arrival_ns for transfer in ran.transfers}
    ready = [0] * graph.num_ops
    for tensor, op in zip(graph.edge_tensors.tolist(), graph.consumers.tolist(), strict=True):
        ready[op] = max(ready[op], there[tensor, placement[op]])
    for ops in ran.order:
        free = 0
        for i, op in enumerate(ops):
            start = ran.op_start_ns[op]
            assert ready[op] <= start == max(free, min(ready[other] for other in ops[i:]))
            waiting = [other for other in ops[i:] if ready[other] < start]
            assert all((-priority[op], op) <= (-priority[other], other) for other in waiting)
            free = ran.op_finish_ns[op]
    assert ran.step_time_ns == max(ran.op_finish_ns)


def check_transfers_are_needed_and_queue(instance: Instance, ran: Schedule) -> None:
    """A tensor goes once to each other device with consumers, and starts when made or when a channel becomes free."""
    graph, cluster, placement = instance.graph, instance.cluster, instance.placement.tolist()
    source = [placement[op] for op in graph.producers.tolist()]
    uses = {(k, placement[op]) for k, op in zip(graph.edge_tensors.tolist(), graph.consumers.tolist(), strict=True)}
    sent = [(transfer.tensor, transfer.destination) for transfer in ran.transfers]
    assert sorted(sent) == sorted(use for use in uses if use[1] != source[use[0]])

    free = [0] * len(cluster.channels)
    for tensor, destination, start, occupancy_end, arrival in ran.transfers:
        a_to_b = source[tensor], destination
        channels = cluster.route_channels[a_to_b[0]][a_to_b[1]]
        assert start == max([ran.op_finish_ns[graph.producers[tensor]], *(free[channel] for channel in channels)])
        moved, size = (occupancy_end - start) * int(cluster.bytes_per_second[a_to_b]), int(graph.tensor_bytes[tensor])
        assert size * 10**9 <= moved < size * 10**9 + int(cluster.bytes_per_second[a_to_b])
        assert arrival - occupancy_end == cluster.latency_ns[a_to_b]
        for channel in channels:
            free[channel] = occupancy_end
