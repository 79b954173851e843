"""Batches in flight: throughput by a hand case, bounds, memory, and never worse than what users run."""

import math

import numpy as np
import pytest

from batch_cases import HELD_BYTES, forward_layers, machine, two_ops
from gdp.errors import InputError
from gdp.graph import Graph, Op, Tensor
from gdp.parallel.layout import Layout
from gdp.parallel.step import ROUNDS, BatchStream, batch_ends
from gdp.search.batches.place_batches import EQUAL_STAGES, REPLICAS, throughput_of
from gdp.search.question import Solution
from gdp.simulator.constraints import Constraints
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import simulate, verify
from gdp.simulator.throughput import Throughput
from hand_cases import make_cluster
from problems import serve


@pytest.mark.parametrize(
    ("layout", "devices", "ends", "time_ns", "latency_ns"),
    [
        # d0 0 0 1 1 . 2 2 . 3 3 . 4 4        batch 2 enters at 5, when batch 0 is done
        # d1 . . 0 0 0 1 1 1 2 2 2 3 3 3      one batch each 3 ns; batch 2 takes from 5 to 11
        (Layout((2,)), ((0, 1),), [5, 8, 11, 14, 17, 20, 23, 26], 3, 6),
        # d0 0 0 . . . 1 1                    one at a time: nothing overlaps
        # d1 . . 0 0 0 . . 1 1 1
        (Layout((1,)), ((0, 1),), [5, 10, 15, 20], 5, 5),
        # d0 0 0 0 0 0 1 1 1 1 1              two batches each 5 ns, which is 2.5 each, rounded up
        # d1 0 0 0 0 0 1 1 1 1 1
        (Layout((1, 1)), ((0,), (1,)), [5, 10, 15, 20], 3, 5),
        # d0 0 0 0 0 0 1 1 1 1 1 2 ...        batch 2 enters at 5 and waits for batch 1: it is done at 15
        (Layout((2,)), ((0,),), [5, 10, 15, 20, 25, 30, 35, 40], 5, 10),
    ],
)
def test_throughput_by_hand(
    layout: Layout, devices: tuple[tuple[int, ...], ...], ends: list[int], time_ns: int, latency_ns: int
) -> None:
    """Two stages of 2 and 3 ns, without transfers that take time."""
    stream = BatchStream.of(two_ops(), layout)
    problem = Problem.build(stream.graph, make_cluster(2, {})).in_order("GPipe")
    places = [0, 0, 1] if len(devices[0]) == 2 else [0, 0, 0]
    priority = problem.priority("GPipe", problem.b_level_ns)
    simulation = simulate(problem, stream.placement(places, devices), priority=priority)
    assert all(simulation.op_finish_ns[done].tolist() == ends for done in batch_ends(stream.graph, layout))
    throughput = Throughput.of(simulation, layout)
    assert (throughput.time_per_batch_ns, throughput.latency_ns) == (time_ns, latency_ns)
    # weights are there once for each device with a replica, and results of one batch at a time
    peaks = [7, 5] if len(devices[0]) == 2 else [12, 12] if layout.data == 2 else [12, 0]
    assert simulation.peak_memory_bytes.tolist() == peaks


def served(choice: Solution) -> dict[str, int]:
    """Returns the time per batch of each baseline that fits."""
    return {each.name: each.step_time_ns for each in choice.looked_at if each.name and each.fits}


@pytest.mark.parametrize(
    ("speeds", "memory", "num_batches"),
    [
        ([1.0] * 4, "1GB", 4),
        ([1.0] * 4, "25MB", 4),  # two layers a device: replicas do not fit
        ([2.0, 1.0, 1.0], "1GB", 8),
        ([1.0] * 3, "1GB", 1),
        ([1.0] * 4, "45MB", 3),
    ],
)
def test_the_answer_is_no_slower_than_what_users_run(speeds: list[float], memory: str, num_batches: int) -> None:
    """It fits, is rebuilt from its document, verifies, and keeps its bounds; memory holds all batches in flight."""
    cluster = machine(speeds, memory)
    choice = serve(forward_layers(), cluster, num_batches, budget="500sims")
    best, figures = choice.best, throughput_of(choice.best)
    problem = best.problem
    assert choice.plan.status == "ok"
    assert verify(problem, choice.plan) == []
    assert all(figures.time_per_batch_ns <= time_ns for time_ns in served(choice).values())
    assert best.layout.num_parts == num_batches
    again = BatchStream.of_document(forward_layers(), choice.plan.layout or {})
    assert again.graph.fingerprint == choice.plan.graph
    for each in choice.looked_at:
        assert each.step_time_ns >= choice.bound_ns
        assert throughput_of(each).busy_fraction.max() <= 1 + 1e-9
        # as many are in flight all the time, so the slowest takes at least the mean: N times the time per batch
        fullest = max(each.layout.microbatches)
        rates = 1 / each.step_time_ns / each.layout.data
        if len(set(each.layout.microbatches)) == 1:
            assert throughput_of(each).latency_ns >= math.floor(0.999 * fullest / rates / 1.0001)


def test_replicas_where_they_fit_and_a_pipeline_where_they_do_not() -> None:
    """40 ms of work on four devices are 10 ms per batch: replicas with nothing to send, stages with 0.1 ms a hop."""
    roomy = serve(forward_layers(), machine([1.0] * 4), 4, budget="300sims")
    assert roomy.best.devices == ((0,), (1,), (2,), (3,))
    assert roomy.best.step_time_ns == 10**7 == roomy.bound_ns
    assert throughput_of(roomy.best).latency_ns == 4 * 10**7
    tight = serve(forward_layers(), machine([1.0] * 4, "15MB"), 5, budget="300sims")
    assert tight.baselines[REPLICAS].status == "infeasible"
    assert tight.baselines[EQUAL_STAGES].status == "ok"
    assert len(tight.best.devices[0]) == 4
    assert tight.best.step_time_ns < 1.02 * 10**7


def test_unequal_devices_get_batches_in_proportion() -> None:
    """Rates add up: 25 + 12.5 + 12.5 batches per second on devices of 2, 1 and 1 Tflop/s are 20 ms per batch."""
    choice = serve(forward_layers(), machine([2.0, 1.0, 1.0]), 8, budget="300sims")
    assert choice.best.step_time_ns == 10 * 10**6
    assert choice.best.layout.microbatches == (4, 2, 2)


def test_pins_are_kept_with_batches_in_flight() -> None:
    """Layers on two devices by name leave one copy of the model, on both."""
    pins = Constraints(pins=(("layers.0", "d0"), ("layers.3", "d1")))
    choice = serve(forward_layers(), machine([1.0] * 2), 2, pins, budget="200sims")
    assert choice.plan.status == "ok"
    problem = choice.best.problem
    assert problem.broken_constraints(choice.plan.placement) == []
    # a pipeline of two layers each takes 20 ms per batch
    assert choice.best.step_time_ns < 21 * 10**6


def test_batches_in_flight_hold_their_activations() -> None:
    """Eight batches in one pipeline of two hold more than two do, as their memory says."""
    peaks = []
    for count in (1, 8):
        stream = BatchStream.of(forward_layers(), Layout((count,)))
        problem = Problem.build(stream.graph, machine([4.0, 1.0]))
        places = np.array([0, 0, 1, 1, 0, 0, 1, 1])
        simulation = simulate(
            problem, stream.placement(places, [[0, 1]]), priority=problem.priority("GPipe", problem.b_level_ns)
        )
        peaks.append(int(simulation.peak_memory_bytes[1]))
    # the second stage is the slower one: what the first has done waits there, all but the batch that it computes
    assert peaks[1] - peaks[0] >= 5 * HELD_BYTES


def test_a_stream_has_the_work_of_its_batches_and_one_copy_of_weights_a_replica() -> None:
    """A stream has the work of all its batches, one copy of the weights per replica, and an end for each batch."""
    graph = forward_layers()
    stream = BatchStream.of(graph, Layout((3, 1)))
    num_batches = 4 * ROUNDS
    assert stream.graph.flops.sum() == num_batches * graph.flops.sum()
    assert stream.graph.resident_bytes.sum() == 2 * graph.resident_bytes.sum()
    assert [len(ends) for ends in batch_ends(stream.graph, stream.layout)] == [3 * ROUNDS, ROUNDS]


@pytest.mark.parametrize(
    ("graph", "num_batches", "problem"),
    [
        (Graph.build("t", [Op("a"), Op("b", phase="backward")], [Tensor(0, (1,))]), 2, "is a training step; add"),
        (Graph.build("m", [Op("a"), Op("a@1", origin=0, microbatch=1)], []), 2, "has copies of ops already"),
        (forward_layers(), 0, "1 to 256"),
        (forward_layers(), 10**6, "1 to 256"),
    ],
)
def test_what_has_no_batches_in_flight_is_refused(graph: Graph, num_batches: int, problem: str) -> None:
    """A training step, a graph with copies of ops, and a number of batches outside 1 to 256 are input errors."""
    with pytest.raises(InputError, match=problem):
        serve(graph, machine([1.0] * 2), num_batches, budget="10sims")
