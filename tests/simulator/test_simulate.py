"""The compiled simulator equals the machine model in plain Python, in every figure."""

import numpy as np
import pytest
from hypothesis import given, settings

from gdp.errors import InputError
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import Simulation, evaluate_many, simulate
from hand_cases import HAND_CASES, HandCase
from reference_simulator import Schedule, b_levels, replay, run
from strategies import Instance, instances

UNLIMITED = np.full(64, 2**62)


def _problem(instance: Instance | HandCase) -> Problem:
    times = np.array(instance.op_time_ns, np.int64)
    return Problem(
        instance.graph,
        instance.cluster,
        times,
        times >= 0,
        UNLIMITED[: times.shape[1]].copy(),
        np.full(times.shape[0], -1),
    )


def _figures(simulation: Simulation) -> dict[str, object]:
    transfers = (
        simulation.transfer_tensors, simulation.transfer_destinations, simulation.transfer_start_ns,
        simulation.transfer_end_ns, simulation.transfer_arrival_ns,
    )  # fmt: skip
    return {
        "op_start_ns": simulation.op_start_ns.tolist(),
        "op_finish_ns": simulation.op_finish_ns.tolist(),
        "transfers": [tuple(row) for row in np.stack(transfers, axis=1).tolist()],
        "order": [ops.tolist() for ops in simulation.order],
        "step_time_ns": simulation.step_time_ns,
        "peak_memory_bytes": simulation.peak_memory_bytes.tolist(),
    }


def _expected(schedule: Schedule) -> dict[str, object]:
    return {
        "op_start_ns": list(schedule.op_start_ns),
        "op_finish_ns": list(schedule.op_finish_ns),
        "transfers": [tuple(transfer) for transfer in schedule.transfers],
        "order": [list(ops) for ops in schedule.order],
        "step_time_ns": schedule.step_time_ns,
        "peak_memory_bytes": list(schedule.peak_memory_bytes),
    }


@pytest.mark.parametrize("case", HAND_CASES, ids=lambda case: case.name)
def test_hand_case(case: HandCase) -> None:
    """Run and replay give the figures worked out by hand."""
    problem = _problem(case)
    for simulation in (
        simulate(problem, case.placement, priority=case.priority),
        simulate(problem, case.placement, order=[np.array(ops, np.int64) for ops in case.order]),
    ):
        assert simulation.op_start_ns.tolist() == list(case.op_start_ns)
        assert _figures(simulation)["transfers"] == list(case.transfers)
        assert [tuple(ops.tolist()) for ops in simulation.order] == list(case.order)
        assert simulation.step_time_ns == case.step_time_ns
        assert tuple(simulation.peak_memory_bytes.tolist()) == case.peak_memory_bytes


@given(instances())
@settings(max_examples=2500)
def test_equals_reference(instance: Instance) -> None:
    """Every start, finish, transfer, order and peak equals the plain-Python reference, run and replayed."""
    problem = _problem(instance)
    arguments = (instance.graph, instance.cluster, instance.op_time_ns, instance.placement)
    expected = run(*arguments, instance.priority)
    assert _figures(simulate(problem, instance.placement, priority=instance.priority)) == _expected(expected)
    assert _figures(simulate(problem, instance.placement, order=expected.order)) == _expected(expected)
    assert problem.b_level_ns.tolist() == b_levels(instance.graph, instance.op_time_ns)


@given(instances())
@settings(max_examples=500)
def test_replay_of_any_order_equals_reference(instance: Instance) -> None:
    """Orders that no priority gives replay alike too: devices start their ops by number, which never deadlocks."""
    order = [np.flatnonzero(instance.placement == device) for device in range(instance.cluster.num_devices)]
    expected = replay(instance.graph, instance.cluster, instance.op_time_ns, instance.placement, order)
    assert _figures(simulate(_problem(instance), instance.placement, order=order)) == _expected(expected)


@given(instances(num_placements=5))
@settings(max_examples=200)
def test_many_equal_one(instance: Instance) -> None:
    """Many placements in a call, on one thread or two, give each one's own figures; an early stop is a lower bound."""
    problem = _problem(instance)
    singles = [simulate(problem, placement, priority=instance.priority) for placement in instance.placements]
    times = [single.step_time_ns for single in singles]
    for num_threads in (1, 2):
        many, peaks = evaluate_many(problem, instance.placements, priority=instance.priority, num_threads=num_threads)
        assert many.tolist() == times
        assert np.array_equal(peaks, np.stack([single.peak_memory_bytes for single in singles]))
    stop_ns = sorted(times)[2]
    stopped, _ = evaluate_many(problem, instance.placements, priority=instance.priority, stop_ns=stop_ns)
    for time_ns, lower in zip(times, stopped.tolist(), strict=True):
        assert lower == time_ns if time_ns < stop_ns else stop_ns <= lower <= time_ns


@pytest.mark.parametrize(
    ("placement", "message"),
    [([0], "shape"), ([0, 9], "op 1 is on device 9"), ([0.0, 1.0], "float64"), ([-1, 0], "op 0 is on device -1")],
)
def test_bad_placements_are_refused(placement: list[float], message: str) -> None:
    """A placement of another length, type or device is one clear error."""
    case = next(case for case in HAND_CASES if case.graph.num_ops == 2)
    with pytest.raises(InputError, match=message):
        simulate(_problem(case), placement)
