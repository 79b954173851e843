"""The compiled simulator equals the machine model in plain Python, in every figure."""

import numpy as np
import pytest
from hypothesis import given, settings

from gdp.arrays import I64
from gdp.cluster import Cluster, Device, Route
from gdp.errors import InputError
from gdp.graph import Graph, Op, Tensor
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import Simulation, evaluate_many, simulate
from hand_cases import HAND_CASES, HandCase
from reference_simulator import Schedule, b_levels, replay, run
from strategies import Instance, instances

UNLIMITED = np.full(130, 2**62)


def _problem(instance: Instance | HandCase, *, for_many: bool = False) -> Problem:
    """Builds the problem; `for_many`: for the engine for more devices than a word has bits, on however few."""
    times = np.array(instance.op_time_ns, np.int64)
    limits_bytes = UNLIMITED[: times.shape[1]].copy()
    hosts, microbatch = np.array(instance.host_time_ns, np.int64), np.full(times.shape[0], -1)
    problem = Problem(instance.graph, instance.cluster, times, hosts, times >= 0, limits_bytes, microbatch)
    problem.simulator.is_for_many |= for_many
    return problem


def _figures(simulation: Simulation) -> dict[str, object]:
    transfers = (
        simulation.transfer_tensors,
        simulation.transfer_destinations,
        simulation.transfer_start_ns,
        simulation.transfer_end_ns,
        simulation.transfer_arrival_ns,
    )
    return {
        "op_start_ns": simulation.op_start_ns.tolist(),
        "op_begin_ns": simulation.op_begin_ns.tolist(),
        "host_issue_ns": simulation.host_issue_ns.tolist(),
        "op_finish_ns": simulation.op_finish_ns.tolist(),
        "transfers": [tuple(row) for row in np.stack(transfers, axis=1).tolist()],
        "order": [ops.tolist() for ops in simulation.order],
        "step_time_ns": simulation.step_time_ns,
        "peak_memory_bytes": simulation.peak_memory_bytes.tolist(),
    }


def _expected(schedule: Schedule) -> dict[str, object]:
    return {
        "op_start_ns": list(schedule.op_start_ns),
        "op_begin_ns": list(schedule.op_begin_ns),
        "host_issue_ns": schedule.host_issue_ns,
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
        assert simulation.op_begin_ns.tolist() == list(case.op_begin_ns)
        assert _figures(simulation)["transfers"] == list(case.transfers)
        assert [tuple(ops.tolist()) for ops in simulation.order] == list(case.order)
        assert simulation.step_time_ns == case.step_time_ns
        assert tuple(simulation.peak_memory_bytes.tolist()) == case.peak_memory_bytes


def _check_against_reference(instance: Instance, *problems: Problem) -> None:
    """In each problem, every start, finish, transfer, order and peak equals the plain-Python reference, run and
    replayed.
    """
    arguments = (instance.graph, instance.cluster, instance.op_time_ns, instance.placement)
    hosts = instance.host_time_ns
    schedule = run(*arguments, instance.priority, hosts)
    order = [np.flatnonzero(instance.placement == device) for device in range(instance.cluster.num_devices)]
    expected = _expected(schedule)
    replayed = _expected(replay(*arguments, order, hosts))  # an order that no priority gives
    levels_ns = b_levels(instance.graph, instance.op_time_ns)
    for problem in problems:
        assert _figures(simulate(problem, instance.placement, priority=instance.priority)) == expected
        assert _figures(simulate(problem, instance.placement, order=schedule.order)) == expected
        assert _figures(simulate(problem, instance.placement, order=order)) == replayed
        assert problem.b_level_ns.tolist() == levels_ns


@given(instances())
@settings(max_examples=2500)
def test_equals_reference(instance: Instance) -> None:
    """The engine for up to 64 devices and the one for more equal the machine model in plain Python."""
    _check_against_reference(instance, _problem(instance), _problem(instance, for_many=True))


@given(instances(always={"hosts"}))
@settings(max_examples=400)
def test_hosts_equal_reference(instance: Instance) -> None:
    """With the clocks of hosts, both engines equal the machine model in plain Python."""
    _check_against_reference(instance, _problem(instance), _problem(instance, for_many=True))


@pytest.mark.long
@given(instances(always={"hosts"}))
@settings(max_examples=2500)
def test_many_hosts_equal_reference(instance: Instance) -> None:
    """2,500 further instances."""
    _check_against_reference(instance, _problem(instance), _problem(instance, for_many=True))


@given(instances(max_ops=300, max_devices=64))
@settings(max_examples=60)
def test_equals_reference_on_larger_steps(instance: Instance) -> None:
    """Ready sets of several words, and up to as many devices as a word has bits."""
    _check_against_reference(instance, _problem(instance))


def _check_lower_bounds(stopped: I64, times: I64, stop_ns: int) -> None:
    """Runs that end before `stop_ns` are exact, others lie between it and their step time."""
    for time_ns, lower in zip(times.tolist(), stopped.tolist(), strict=True):
        assert lower == time_ns if time_ns < stop_ns else stop_ns <= lower <= time_ns


def test_ready_sets_of_all_sizes_are_in_order() -> None:
    """270,000 ops that are ready at once fill sets of three levels; the engine for many devices has heaps instead."""
    rng = np.random.default_rng(0)
    graph = Graph.build("wide", [Op(f"op{number}", flops=10**9) for number in range(270_000)], [])
    cluster, placement = Cluster.parse("2xl4-24g"), rng.integers(0, 2, graph.num_ops)
    priority = rng.integers(0, 10**6, graph.num_ops)
    problem, problem_for_many = Problem.build(graph, cluster), Problem.build(graph, cluster)
    problem_for_many.simulator.is_for_many = True
    own, other = (simulate(each, placement, priority=priority) for each in (problem, problem_for_many))
    assert own.op_start_ns.tolist() == other.op_start_ns.tolist()


@given(instances(min_devices=65, max_devices=130, max_ops=60))
@settings(max_examples=40)
def test_equals_reference_on_many_devices(instance: Instance) -> None:
    """The engine equals it on 65 to 130 unlike devices, with channels that they share."""
    _check_against_reference(instance, _problem(instance))


@given(instances(num_placements=4))
@settings(max_examples=200)
def test_early_stop_on_many_is_a_lower_bound(instance: Instance) -> None:
    """Steps that are stopped early leave nothing behind in the working memory of the next one."""
    problem = _problem(instance, for_many=True)
    times, peaks = evaluate_many(problem, instance.placements, num_threads=1)
    stop_ns = sorted(times.tolist())[1]
    stopped, _ = evaluate_many(problem, instance.placements, stop_ns=stop_ns, num_threads=1)
    _check_lower_bounds(stopped, times, stop_ns)
    again = evaluate_many(problem, instance.placements, num_threads=1)
    assert np.array_equal(again[0], times)
    assert np.array_equal(again[1], peaks)


def test_working_memory_stays_small() -> None:
    """On 512 devices no array is larger than the routes or the edges of the graph."""
    graph = Graph.build(
        "chain", [Op(f"op{n}", flops=1) for n in range(5000)], [Tensor(n, (n + 1,)) for n in range(4999)]
    )
    problem = Problem.build(graph, "64x(8xl4-24g)@100gbit")
    with problem.simulator.workspace() as workspace:
        sizes = [array.size for record in workspace for array in record]
    assert max(sizes) <= 512 * 512
    assert problem.op_time_ns.strides[1] == problem.allowed.strides[1] == 0, "devices that are alike share a column"


@given(instances(num_placements=5))
@settings(max_examples=200)
def test_many_equal_one(instance: Instance) -> None:
    """Many placements in a call, on one thread or two, give each one's own figures; an early stop is a lower bound."""
    problem = _problem(instance)
    singles = [simulate(problem, placement, priority=instance.priority) for placement in instance.placements]
    times = np.array([single.step_time_ns for single in singles])
    for num_threads in (1, 2):
        many, peaks = evaluate_many(problem, instance.placements, priority=instance.priority, num_threads=num_threads)
        assert many.tolist() == times.tolist()
        assert np.array_equal(peaks, np.stack([single.peak_memory_bytes for single in singles]))
    stop_ns = sorted(times.tolist())[2]
    stopped, _ = evaluate_many(problem, instance.placements, priority=instance.priority, stop_ns=stop_ns)
    _check_lower_bounds(stopped, times, stop_ns)


@pytest.mark.parametrize(
    ("placement", "message"),
    [([0], "shape"), ([0, 9], "op 1 is on device 9"), ([0.0, 1.0], "float64"), ([-1, 0], "op 0 is on device -1")],
)
def test_bad_placements_are_refused(placement: list[float], message: str) -> None:
    """A placement of another length, type or device is one clear error."""
    case = next(case for case in HAND_CASES if case.graph.num_ops == 2)
    with pytest.raises(InputError, match=message):
        simulate(_problem(case), placement)


def test_model_flops_utilisation() -> None:
    """The model's FLOPs in its main type count, of the devices in use; not recomputed ones, updates, nor other types.

    On devices a, b, c of 1e12 FLOP/s in bfloat16 and 1e9 in float32: a computes 2e9 in 2 ms, then 1e9 again for the
    backward pass, and 1e9 of an update; b 1e9 in 1 ms, then 3e6 of float32 in 3 ms: a step of 4 ms. 3e9 of 2 x 4e9 is
    37.5 %.
    """
    rates = {"float32": 10**9, "bfloat16": 10**12}
    devices = [Device(name, "card", 2**30, rates, 10**9, 0) for name in "abc"]
    routes = {(a, b): Route(0, 10**9, (f"{a}{b}",)) for a in range(3) for b in range(3) if a != b}
    ops = [
        Op("first", flops=2 * 10**9, dtype="bfloat16"),
        Op("again", flops=10**9, dtype="bfloat16", origin=0, role="recomputed"),
        Op("update", flops=10**9, dtype="bfloat16", phase="update"),
        Op("second", flops=10**9, dtype="bfloat16"),
        Op("loss", flops=3 * 10**6),
    ]
    problem = Problem.build(Graph.build("step", ops, []), Cluster.build("three", devices, routes))
    simulation = simulate(problem, [0, 0, 0, 1, 1])
    assert (simulation.step_time_ns, simulation.mfu) == (4_000_000, (0.375, "bfloat16"))


def test_model_flops_utilisation_is_of_devices_that_compute() -> None:
    """A processor that holds weights has no share, and none is of float32 while a card in use has the type.

    `first` takes 2 ms on the card of 1e12 FLOP/s in bfloat16, `small` of 1e6 takes 1 ms at the 1e9 of the processor:
    beside weights alone the card is always busy; with both, 2.001e9 of 2 ms x 1.001e12 FLOP/s are 99.95 %.
    """
    rates = {"float32": 10**9, "bfloat16": 10**12}
    devices = [
        Device("gpu0", "card", 2**30, rates, 10**9, 0),
        Device("cpu0", "cpu", 2**30, {"float32": 10**9}, 10**9, 0),
    ]
    routes = {(a, b): Route(0, 10**9, (f"{a}{b}",)) for a, b in ((0, 1), (1, 0))}
    sizes = {"first": 2 * 10**9, "weights": 0, "small": 10**6}
    ops = [Op(name, flops=flops, dtype="bfloat16") for name, flops in sizes.items()]
    problem = Problem.build(Graph.build("step", ops, []), Cluster.build("both", devices, routes))
    found = [simulate(problem, placement).mfu for placement in ([0, 1, 0], [0, 0, 1], [1, 1, 1])]
    assert found == [(1.0, "bfloat16"), (pytest.approx(2.001 / 2.002), "bfloat16"), (1.0, "float32")]
