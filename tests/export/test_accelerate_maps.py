"""accelerate's device maps: asked of the library, run as it runs them, scored by gdp's simulator."""

import random
from dataclasses import replace

import numpy as np
import pytest
from torch import nn, ones

from gdp import capture
from gdp.cli.inputs import split_rivals
from gdp.cluster import Cluster, Device, Route
from gdp.errors import InputError
from gdp.export import accelerate_maps
from gdp.export.accelerate_maps import MODES, best_step, device_map, fetching_late, placement_of
from gdp.graph import Graph, Op, Tensor
from gdp.models.model import Reading
from gdp.models.source import ModelSource
from gdp.planning.compare import DEFAULT_PLACERS, compare
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import simulate

MS, MB = 10**6, 10**6


class Block(nn.Module):
    """Two layers and a residual connection, which must stay together."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(512)
        self.first, self.second = nn.Linear(512, 2048), nn.Linear(2048, 512)

    def forward(self, x):  # type: ignore[no-untyped-def]
        return x + self.second(nn.functional.relu(self.first(self.norm(x))))


class Net(nn.Module):
    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(64, 512)
        self.blocks = nn.ModuleList(Block() for _ in range(8))
        self.head = nn.Linear(512, 10)

    def forward(self, x):  # type: ignore[no-untyped-def]
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def machine(preset: str, memory_bytes: int) -> Cluster:
    """That preset, its GPUs with so much memory."""
    cluster = Cluster.parse(preset)
    devices = [
        device if "cpu" in device.kind else replace(device, memory_bytes=memory_bytes) for device in cluster.devices
    ]
    pairs = [(a, b) for a in range(len(devices)) for b in range(len(devices)) if a != b]
    return Cluster.build("machine", devices, {pair: cluster.route(*pair) for pair in pairs})


def captured(training: bool) -> Graph:
    return capture(Net(), (ones(256, 64),), name="net", training=training).graph


@pytest.mark.parametrize("training", [False, True])
def test_modules_run_where_their_entry_is(training: bool) -> None:
    """A module runs on the device of its entry, with its weights."""
    graph = captured(training)
    problem = Problem.build(graph, Cluster.parse("3xl4-24g"))
    rng = random.Random(1)
    for _ in range(5):
        chosen = {path: rng.randrange(3) for path in ("embed", *(f"blocks.{n}" for n in range(8)), "head")}
        placement = placement_of(problem, chosen)
        assert placement is not None
        assert problem.broken_constraints(placement) == []
        for module, device in zip(graph.modules, placement.tolist(), strict=True):
            path = ".".join(module.split(".")[:2]) if module.startswith("blocks") else module
            if path in chosen:
                assert device == chosen[path]


def test_offloaded_modules() -> None:
    """An offloaded module keeps its weights on the CPU, and computes on the GPU of the lowest number, as
    accelerate's `dispatch_model` chooses it."""
    graph = captured(training=False)
    problem = Problem.build(graph, Cluster.parse("2xl4-24g+cpu-16core"))
    placement = placement_of(problem, {"embed": 1, "blocks": "cpu", "head": 0})
    assert placement is not None
    for kind, module, device in zip(graph.kinds, graph.modules, placement.tolist(), strict=True):
        if module.startswith("blocks"):
            assert device == (2 if kind == "parameter" else 0)
        elif module in ("embed", "head"):
            assert device == (1 if module == "embed" else 0)
    # neither a CPU that is not there nor training of offloaded weights
    assert placement_of(Problem.build(graph, Cluster.parse("2xl4-24g")), {"embed": 0, "blocks": "cpu"}) is None
    trained = Problem.build(captured(training=True), Cluster.parse("2xl4-24g+cpu-16core"))
    assert placement_of(trained, {"embed": 1, "blocks": "cpu", "head": 0}) is None


def test_maps_of_accelerate() -> None:
    """8 blocks of 8.4 MB: balanced puts about half on each of two GPUs, sequential all on the first; a first one that
    holds 40 MB gets 4 blocks at most."""
    graph = captured(training=False)
    roomy = Problem.build(graph, Cluster.parse("2xl4-24g"))
    assert device_map(Net(), roomy, "sequential") == {"": 0}
    balanced = device_map(Net(), roomy, "balanced")
    assert balanced is not None
    assert sum(device == 0 for path, device in balanced.items() if path.startswith("blocks")) in (4, 5)
    small = Problem.build(graph, machine("2xl4-24g", 40 * MB))
    found = device_map(Net(), small, "sequential")
    assert found is not None
    assert all(path.count(".") <= 1 for path in found)
    assert sum(device == 0 for path, device in found.items() if path.startswith("blocks")) <= 4


def test_late_fetches() -> None:
    """Three layers of 10 ms, each with a weight on the CPU that takes 5 ms to send.

    at once:  |5 ms| l1 10 | l2 10 | l3 10 |        35 ms, up to three weights on the GPU
    late:     |5 ms| l1 10 |5| l2 10 |5| l3 10 |    45 ms and two latencies each way, one weight on the GPU
    """
    ops, tensors = [], []
    for layer in range(3):
        ops += [Op(f"w{layer}", "parameter", resident_bytes=100 * MB), Op(f"l{layer}", "mm")]
        tensors.append(Tensor(2 * layer, (2 * layer + 1,), 100 * MB, resident=True))
        tensors += [Tensor(2 * layer + 1, (2 * layer + 3,), 0)] if layer < 2 else []
    figures = {"flops_per_second": {"float32": 10**12}, "memory_bytes_per_second": 10**12, "launch_ns": 0}
    devices = [Device(name=name, kind=f"test-{name}", memory_bytes=10**9, **figures) for name in ("gpu", "cpu")]
    routes = {pair: Route(1000, 20 * 10**9, (f"{pair}",)) for pair in ((0, 1), (1, 0))}
    cluster = Cluster.build("machine", devices, routes)
    times = np.array([[0, 0], [10 * MS, 99 * MS]] * 3)
    problem = Problem.build(Graph.build("layers", ops, tensors), cluster, op_time_ns=times)
    placement = np.array([1, 0] * 3)
    at_once = simulate(problem, placement)
    assert (at_once.step_time_ns, int(at_once.peak_memory_bytes[0])) == (35 * MS + 1000, 300 * MB)
    late = fetching_late(problem, placement)
    assert late is not None
    simulation = simulate(*late)
    assert (simulation.step_time_ns, int(simulation.peak_memory_bytes[0])) == (45 * MS + 5 * 1000, 100 * MB)
    assert fetching_late(problem, np.zeros(6, np.int64)) is None


@pytest.mark.parametrize("mode", MODES)
def test_best_map_of_a_mode(mode: str) -> None:
    """On a GPU that holds half of the weights beside a CPU: offloading fits, slower than a GPU that holds all."""
    graph = captured(training=False)
    roomy = Problem.build(graph, machine("l4-24g+cpu-16core", 10**9))
    tight = Problem.build(graph, machine("l4-24g+cpu-16core", 45 * MB))
    whole, offloaded = best_step(Net(), roomy, mode), best_step(Net(), tight, mode)
    assert whole is not None
    assert offloaded is not None
    assert whole.feasible
    assert offloaded.feasible
    assert offloaded.step_time_ns > whole.step_time_ns
    assert set(offloaded.placement.tolist()) == {0, 1}


def test_compare() -> None:
    """`gdp compare` scores accelerate's maps beside placers."""
    graph, cluster = captured(training=False), Cluster.parse("2xl4-24g")
    rivals = {"accelerate-auto": lambda problem: best_step(Net(), problem, "auto"), "none": lambda problem: None}
    rows = compare(graph, cluster, placers=["single"], rivals=rivals, seeds=1).rows
    assert [(row.placer, row.status) for row in rows] == [
        ("accelerate-auto", "ok"),
        ("none", "failed"),
        ("single", "ok"),
    ]


def test_defaults_of_compare() -> None:
    """`gdp compare` asks accelerate by default only for the maps that it can give."""

    def split(model: str, placers: str | None, microbatches: int = 1) -> tuple[list[str], list[str]]:
        return split_rivals(ModelSource(model, Reading(microbatches=microbatches)), placers)

    assert split("hf:bert", None) == ([*DEFAULT_PLACERS], [*accelerate_maps.NAMES])
    assert split("hf:bert", None, 2) == ([*DEFAULT_PLACERS], [])
    assert split("gnmt-2", None) == ([*DEFAULT_PLACERS], [])
    assert split("gnmt-2", "accelerate-auto, heft") == (["heft"], ["accelerate-auto"])
    with pytest.raises(InputError, match="name each once"):
        split("gnmt-2", "accelerate-auto,accelerate-auto")
