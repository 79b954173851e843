"""The critical path and the memory curves say of a simulated step what the simulator does."""

import numpy as np
import pytest
from hypothesis import given, settings

from gdp.report.limits import AFTER_OP, AFTER_TRANSFER, AT_ONCE, CHANNEL_BUSY, DEVICE_BUSY, Limits, Waits
from gdp.report.memory_curves import alive_at, memory_curves
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import Allocations, Simulation, simulate
from hand_cases import HAND_CASES, HandCase
from strategies import Instance, instances


def _simulate(case: Instance | HandCase) -> Simulation:
    times, hosts = (np.array(table, np.int64) for table in (case.op_time_ns, case.host_time_ns))
    limits = np.full(times.shape[1], 2**62)
    problem = Problem(case.graph, case.cluster, times, hosts, times >= 0, limits, np.full(len(times), -1))
    return simulate(problem, case.placement, priority=case.priority)


def _check_path(simulation: Simulation) -> None:
    waits = Waits.of(simulation)
    start_ns = np.maximum(waits.ready_ns, waits.device_free_ns)
    assert start_ns.tolist() == simulation.op_start_ns.tolist()
    ended_ns = 0
    for step in waits.path:
        starts = simulation.transfer_start_ns if step.is_transfer else simulation.op_start_ns
        assert starts[step.number] in (ended_ns, _channel_end(simulation, waits, step.number, step.after))
        ends = simulation.transfer_arrival_ns if step.is_transfer else simulation.op_finish_ns
        ended_ns = ends[step.number]
    assert ended_ns == simulation.step_time_ns
    assert waits.path[0].after == AT_ONCE


def _channel_end(simulation: Simulation, waits: Waits, transfer: int, after: int) -> int:
    """A transfer that waits for its channel starts at the end of occupancy, which is before the arrival."""
    if after != CHANNEL_BUSY:
        return -1
    return int(simulation.transfer_end_ns[waits.transfer_before[transfer]])


def _check_memory(simulation: Simulation) -> None:
    allocations = Allocations.of(simulation)
    curves = memory_curves(simulation, allocations)
    assert [curve.peak_bytes for curve in curves] == simulation.peak_memory_bytes.tolist()
    for curve in curves:
        assert (np.diff(curve.times_ns) > 0).all()
        alive = alive_at(allocations, curve.device, curve.peak_ns)
        assert curve.resident_bytes + allocations.sizes_bytes[alive].sum() == curve.peak_bytes
        assert curve.thinned(4)[1].max() == curve.peak_bytes


@pytest.mark.parametrize("case", HAND_CASES, ids=lambda case: case.name)
def test_hand_case(case: HandCase) -> None:
    """Each op of a critical path starts when the one before ends, and curves peak where the hand-made case does."""
    simulation = _simulate(case)
    _check_path(simulation)
    _check_memory(simulation)
    peaks = [curve.peak_bytes for curve in memory_curves(simulation, Allocations.of(simulation))]
    assert tuple(peaks) == case.peak_memory_bytes


@settings(max_examples=60)
@given(instances())
def test_any_step(instance: Instance) -> None:
    """The critical path explains all of any step, and memory curves have the simulator's peaks."""
    simulation = _simulate(instance)
    _check_path(simulation)
    _check_memory(simulation)


def test_every_reason_is_found() -> None:
    """The hand-made cases have starts for each of the five reasons."""
    reasons = {step.after for case in HAND_CASES for step in Waits.of(_simulate(case)).path}
    assert reasons == {AT_ONCE, AFTER_OP, AFTER_TRANSFER, DEVICE_BUSY, CHANNEL_BUSY}


def test_a_host_that_limits_a_step_is_named() -> None:
    """Ops of 1 ns that hosts take 3 ns to issue: the device waits from 0 to 3, from 4 to 6 and from 7 to 9 of 10 ns."""
    case = next(case for case in HAND_CASES if case.name == "a chain of small ops is bound by its host")
    expected = "The host limits the step: d0 waits for it for 70% of the step, d0 computes for 30% of the step."
    assert str(Limits.of(_simulate(case))) == expected
