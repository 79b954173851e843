"""The classical placers: what all of them promise on any problem, and what each of them is known for, by hand."""

import ctypes
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings

from gdp.cluster import Cluster, Device, Route
from gdp.graph import Graph, Op, Tensor
from gdp.placers import CLASSICAL, fit_memory
from gdp.placers.contiguous import module_chain, stages, topological_chain
from gdp.placers.expert import layer_ranges
from gdp.placers.list_scheduling import _transfers, favourite_children
from gdp.placers.memory_repair import excess_bytes, held_bytes
from gdp.placers.metis import _without_complaints
from gdp.simulator.longest_paths import longest_from
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import evaluate, simulate
from gdp.units.units import Units, forward_units
from hand_cases import make_cluster
from strategies import Instance, instances

MS = 1_000_000
MIB = 2**20


def training_graph(num_layers: int = 8, *, branches: int = 2) -> Graph:
    """Layers of `branches` parallel ops of 1 ms forward and 2 ms backward, activations of 1 MiB that the backward ops
    read, and 4 MiB of parameters a layer with their update."""
    ops = [
        Op(f"w{layer}", "parameter", resident_bytes=4 * MIB, module=f"layers.{layer}", group=layer, phase="forward")
        for layer in range(num_layers)
    ]
    consumers: list[list[int]] = [[] for _ in range(num_layers)]
    producers = list(range(num_layers))
    tensor_of: dict[str, int] = {}

    def add(name: str, time_ms: int, layer: int, phase: str, inputs: list[int], group: int = -1) -> int:
        for tensor in inputs:
            consumers[tensor].append(len(ops))
        ops.append(
            Op(name, name[0], time_ns={"test-device": time_ms * MS}, module=f"layers.{layer}", phase=phase, group=group)
        )
        producers.append(len(ops) - 1)
        consumers.append([])
        tensor_of[name] = len(producers) - 1
        return tensor_of[name]

    x: list[int] = []
    for layer in range(num_layers):
        x = [add(f"f{layer}.{branch}", 1, layer, "forward", [layer, *x]) for branch in range(branches)]
    for layer in reversed(range(num_layers)):
        saved = [tensor_of[f"f{layer}.{branch}"] for branch in range(branches)]
        later = x
        x = [add(f"b{layer}.{branch}", 2, layer, "backward", [saved[branch], *later]) for branch in range(branches)]
        add(f"u{layer}", 0, layer, "update", [layer, *x], group=layer)
    tensors = [
        Tensor(
            producer, tuple(dict.fromkeys(users)), (4 if number < num_layers else 1) * MIB, resident=number < num_layers
        )
        for number, (producer, users) in enumerate(zip(producers, consumers, strict=True))
    ]
    return Graph.build("training", ops, tensors)


def cluster_of(num_devices: int, memory_bytes: int = 2**50) -> Cluster:
    """Equal devices, 16 GiB/s between them, 5 us latency."""
    pairs = {
        (a, b): Route(5000, 16 * 2**30, (f"{a}-{b}",)) for a in range(num_devices) for b in range(num_devices) if a != b
    }
    return make_cluster(num_devices, pairs, memory_bytes)


def unequal_problem() -> Problem:
    """A device that cannot run some backward ops, a slow one, and one that cannot run layer 0."""
    graph, cluster = training_graph(), cluster_of(3)
    times = np.maximum(Problem.build(graph, cluster).op_time_ns, 1)
    times[:, 1] *= 3
    kinds = np.array(graph.kinds)
    times[kinds == "b", 0] = np.where(np.arange((kinds == "b").sum()) % 4 == 0, -1, times[kinds == "b", 0])
    times[[module == "layers.0" for module in graph.modules], 2] = -1
    return Problem.build(graph, cluster, op_time_ns=times)


def check_contract(problem: Problem, name: str) -> None:
    placement = CLASSICAL[name](problem, 0)
    again = CLASSICAL[name](problem, 0)
    if placement is None:
        assert name == "single"
        assert not problem.allowed.all(axis=0).any()
        return
    assert placement.dtype == np.int64
    assert problem.broken_constraints(placement) == []
    evaluate(problem, placement)
    np.testing.assert_array_equal(placement, again)


@pytest.mark.parametrize("name", CLASSICAL)
@given(instance=instances())
@settings(max_examples=25)
def test_placements_obey_and_repeat(name: str, instance: Instance) -> None:
    """Each placer obeys groups and devices on any problem, and repeats its answer."""
    check_contract(Problem.build(instance.graph, instance.cluster), name)


@pytest.mark.parametrize("name", CLASSICAL)
@pytest.mark.parametrize(
    "problem", [Problem.build(training_graph(), cluster_of(4)), unequal_problem()], ids=["equal", "unequal"]
)
def test_training_graphs_are_placed(name: str, problem: Problem) -> None:
    """Each placer obeys groups and devices on training graphs."""
    check_contract(problem, name)


@pytest.mark.parametrize("name", [name for name in CLASSICAL if name != "single"])
def test_steps_are_made_to_fit(name: str) -> None:
    """A step that fits only on several devices is made to fit."""
    # 8 layers x (4 MiB parameters + 2 MiB activations) = 48 MiB, and copies; 4 devices of 22 MiB
    problem = Problem.build(training_graph(), cluster_of(4, 22 * MIB))
    placement = CLASSICAL[name](problem, 0)
    assert placement is not None
    assert simulate(problem, placement).reasons == []


@pytest.mark.parametrize("name", ["contiguous", "metis", "m-etf", "m-sct", "heft"])
def test_chains_are_spread(name: str) -> None:
    """Independent chains are spread without a transfer."""
    # 4 chains of 8 ops of 1 ms with 64 MiB between them: 8 ms on 4 devices, 32 ms on one
    ops = [Op(f"{chain}.{step}", time_ns={"test-device": MS}) for chain in range(4) for step in range(8)]
    tensors = [Tensor(8 * chain + step, (8 * chain + step + 1,), 64 * MIB) for chain in range(4) for step in range(7)]
    problem = Problem.build(Graph.build("chains", ops, tensors), cluster_of(4))
    placement = CLASSICAL[name](problem, 0)
    assert placement is not None
    assert evaluate(problem, placement)[0] == 8 * MS


def test_single_takes_the_fastest_that_fits() -> None:
    """One device: the fastest on which all fits."""
    # device 0 is fastest but too small, device 2 is faster than device 1
    graph = Graph.build("two", [Op("a", resident_bytes=10), Op("b")], [Tensor(0, (1,), 1)])
    times = np.array([[1, 5, 3], [1, 5, 3]])
    problem = Problem.build(graph, make_cluster(3, {}, 100), op_time_ns=times, max_memory_bytes={"d0": 5})
    placement = CLASSICAL["single"](problem, 0)
    assert placement is not None
    assert placement.tolist() == [2, 2]
    split = Problem.build(graph, make_cluster(3, {}, 100), op_time_ns=np.array([[1, -1, -1], [-1, 1, 1]]))
    assert CLASSICAL["single"](split, 0) is None


# The example of Topcuoglu, Hariri and Wu (IEEE TPDS 2002), figure 2 and table 2: 10 tasks, 3 processors.
HEFT_TIMES = [
    [14, 16, 9],
    [13, 19, 18],
    [11, 13, 19],
    [13, 8, 17],
    [12, 13, 10],
    [13, 16, 9],
    [7, 15, 11],
    [5, 11, 14],
    [18, 12, 20],
    [21, 7, 16],
]
HEFT_EDGES = {
    (0, 1): 18,
    (0, 2): 12,
    (0, 3): 9,
    (0, 4): 11,
    (0, 5): 14,
    (1, 7): 19,
    (1, 8): 16,
    (2, 6): 23,
    (3, 7): 27,
    (3, 8): 23,
    (4, 8): 13,
    (5, 7): 15,
    (6, 9): 17,
    (7, 9): 11,
    (8, 9): 13,
}


def heft_problem() -> Problem:
    """1 unit of time is 1 us, so that rounding down does not matter; 1 byte takes 1 ns; transfers never wait."""
    ops = [Op(f"n{number + 1}") for number in range(10)]
    tensors = [Tensor(source, (target,), 1000 * cost) for (source, target), cost in HEFT_EDGES.items()]
    names = ["p1", "p2", "p3"]
    devices = [Device(name, "test-device", 2**50, {"float32": 10**9}, 10**9, 0) for name in names]
    routes = {(a, b): Route(0, 10**9, ()) for a in range(3) for b in range(3) if a != b}
    cluster = Cluster.build("heft", devices, routes)
    return Problem.build(Graph.build("heft", ops, tensors), cluster, op_time_ns=1000 * np.array(HEFT_TIMES))


def test_heft_ranks_as_published() -> None:
    """Upward ranks are those of the paper's example."""
    # table 3: 108, 77, 80, 80, 69, 63.333, 42.667, 35.667, 44.333, 14.667
    problem = heft_problem()
    ranks = longest_from(problem.mean_op_time_ns, *_transfers(problem)) / 1000
    expected = [108, 77, 80, 80, 69, 63.333, 42.667, 35.667, 44.333, 14.667]
    np.testing.assert_allclose(ranks, expected, atol=0.01)


def test_heft_schedules_as_published() -> None:
    """The schedule of the paper's example is as long as there."""
    # figure 4: 80; its order is not the simulator's, which starts ops by b-level, so the best of the variants counts
    placement = CLASSICAL["heft"](heft_problem(), 0)
    assert placement is not None
    assert evaluate(heft_problem(), placement)[0] <= 80_000


def test_favourite_children() -> None:
    """Favourite children are the matching that shortens the step most."""
    # transfers 0 -> 1 -> 3 cost 5 each, 0 -> 2 -> 3 cost 1 each, ops take 10: with 0, 1, 3 together the other path is
    # 10 + 1 + 10 + 1 + 10 = 32, in any other matching some path takes at least 36
    ops = [Op(f"op{number}", time_ns={"test-device": 10}) for number in range(4)]
    tensors = [Tensor(0, (1,), 5), Tensor(0, (2,), 1), Tensor(1, (3,), 5), Tensor(2, (3,), 1)]
    problem = Problem.build(Graph.build("diamond", ops, tensors), make_cluster(2, {}))
    assert favourite_children(problem).tolist() == [1, 3, -1, -1]


def test_stages_take_equally_long() -> None:
    """Stages on unequal devices take equally long."""
    # 9 ops of 1 ms, device 0 twice as fast as device 1: 6 ops of 0.5 ms and 3 of 1 ms, 3 ms each
    ops = [Op(f"op{number}") for number in range(9)]
    graph = Graph.build("chain", ops, [Tensor(number, (number + 1,), 1) for number in range(8)])
    problem = Problem.build(graph, make_cluster(2, {}), op_time_ns=np.tile([MS // 2, MS], (9, 1)))
    units = Units.of(problem)
    assert stages(problem, units, topological_chain(problem, units), np.arange(2)).tolist() == [0] * 6 + [1] * 3


def test_stages_keep_layers_together() -> None:
    """Stages keep a layer with its backward ops and parameters."""
    problem = Problem.build(training_graph(), cluster_of(4))
    units = Units.of(problem)
    chosen = stages(problem, units, module_chain(problem, units, whole_layers=True), np.arange(4))[units.index]
    expected = [int(module.split(".")[1]) // 2 for module in problem.graph.modules]  # 8 equal layers on 4 devices
    assert chosen.tolist() == expected


def test_expert_cuts_layers_equally() -> None:
    """The expert cuts the longest list of layers into equal ranges."""
    modules = [
        "",
        "embed",
        *(f"blocks.{layer}.mlp.{part}" for layer in range(4) for part in range(2)),
        "blocks",
        "head",
    ]
    ops = [Op(f"op{number}", module=module, time_ns={"test-device": MS}) for number, module in enumerate(modules)]
    graph = Graph.build("lm", ops, [Tensor(a, (b,), 1) for a, b in pairwise(range(len(ops)))])
    devices = layer_ranges(Problem.build(graph, cluster_of(2)), 2)
    assert devices is not None
    assert devices.tolist() == [0, 0, *[0] * 4, *[1] * 4, 1, 1]
    placement = CLASSICAL["expert"](Problem.build(graph, cluster_of(2)), 0)
    assert placement is not None
    assert placement.tolist() == devices.tolist()


def test_expert_takes_stages_where_layers_are_unequal() -> None:
    """Stages of equal time beat equal numbers of layers where the first layer takes half of the time."""
    layers = [Op(f"op{n}", module=f"blocks.{n}", time_ns={"test-device": MS * (3 if n == 0 else 1)}) for n in range(4)]
    ops = [Op("input", time_ns={"test-device": 0}), *layers, Op("sum", module="sum", time_ns={"test-device": 0})]
    edges = [Tensor(0, (1, 2, 3, 4), 1), *(Tensor(n, (5,), 1) for n in range(1, 5))]  # layers side by side
    problem = Problem.build(Graph.build("tower", ops, edges), cluster_of(2))
    ranges = layer_ranges(problem, 2)
    assert ranges is not None
    placement = CLASSICAL["expert"](problem, 0)
    assert placement is not None
    assert simulate(problem, placement).step_time_ns < simulate(problem, ranges).step_time_ns


def test_backward_joins_forward() -> None:
    """Backward ops join the forward ops whose results they use."""
    problem = Problem.build(training_graph(2, branches=1), cluster_of(2))
    numbers = {name: number for number, name in enumerate(problem.graph.op_names)}
    unit = forward_units(problem)
    # the backward op of layer 0 has no consumer but the update of its parameter, so it goes where the parameter is
    assert unit[numbers["b0.0"]] == unit[numbers["w0"]] == unit[numbers["u0"]]
    assert unit[numbers["b1.0"]] == unit[numbers["f1.0"]] != unit[numbers["w1"]]


@given(instance=instances(keep_groups=True))
@settings(max_examples=150)
def test_held_bytes_sum_to_the_peak(instance: Instance) -> None:
    """The bytes that ops hold at the peak sum to the peak."""
    problem = Problem.build(instance.graph, instance.cluster)
    simulation = simulate(problem, instance.placement)
    for device in range(problem.num_devices):
        assert held_bytes(simulation, device).sum() == simulation.peak_memory_bytes[device]


@given(instance=instances(keep_groups=True))
@settings(max_examples=60)
def test_repair_never_misses_more(instance: Instance) -> None:
    """Repair misses no more memory than before, and keeps a placement that fits."""
    problem = Problem.build(instance.graph, instance.cluster)
    repaired = fit_memory(problem, instance.placement)
    (time, peaks), (repaired_time, repaired_peaks) = (
        evaluate(problem, which) for which in (instance.placement, repaired)
    )
    before, after = excess_bytes(problem, peaks), excess_bytes(problem, repaired_peaks)
    assert (after, repaired_time) < (before, time) or np.array_equal(repaired, instance.placement)
    assert problem.broken_constraints(repaired) == problem.broken_constraints(instance.placement) == []


def test_repair_spreads_one_device() -> None:
    """Repair spreads a full device without making the step longer."""
    # 48 MiB of parameters and activations on a device of 28 MiB beside an empty one
    problem = Problem.build(training_graph(), cluster_of(2, 28 * MIB))
    placement = np.zeros(problem.num_ops, np.int64)
    repaired = simulate(problem, fit_memory(problem, placement))
    assert repaired.reasons == []
    assert repaired.step_time_ns <= evaluate(problem, placement)[0]


def test_complaints_of_metis_are_not_shown(capfd: pytest.CaptureFixture[str]) -> None:
    """It prints them with C's printf: standard output is for answers, and nobody can act on them."""
    with _without_complaints():
        ctypes.CDLL(None).puts(b"***Cannot bisect a graph with 0 vertices!")
    print("answer")
    assert capfd.readouterr() == ("answer\n", "")
