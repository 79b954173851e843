"""Exports for servers: never slower than one device, and as full as each other where that costs no time."""

import numpy as np
import pytest
from export_models import graph_of
from hypothesis import given, settings
from hypothesis import strategies as st

from batch_cases import machine
from gdp.cluster import Cluster
from gdp.export.adapt import adapt
from gdp.export.targets_by_name import find_target
from gdp.search.question import plan_of
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import simulate

SERVERS = ("vllm", "llama-cpp", "hf-device-map")
HELD_BYTES = int(graph_of("llama").resident_bytes.sum())


@given(
    speeds=st.lists(st.sampled_from([0.1, 1.0, 3.0]), min_size=2, max_size=3),
    room=st.sampled_from([0.7, 1.5, 40.0]),
    seed=st.integers(0, 99),
    is_by_layer=st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_no_slower_than_the_best_device_that_fits(
    speeds: list[float], room: float, seed: int, is_by_layer: bool
) -> None:
    """Whatever the plan, the file is at least as fast as all of the model on any one device that holds it."""
    graph = graph_of("llama")
    problem = Problem.build(graph, machine(speeds, f"{int(room * HELD_BYTES)}B"))
    rng = np.random.default_rng(seed)
    for name in SERVERS:
        target = find_target(name)
        units = target.read_units(problem)
        devices = rng.integers(len(speeds), size=units.num_units if is_by_layer else graph.num_ops)
        placement = units.place(devices) if is_by_layer else devices
        if not is_by_layer:
            grouped = graph.groups >= 0
            placement[grouped] = 0
        adapted = adapt(problem, plan_of(simulate(problem, placement), 0, "by hand", 0), target)
        room_for = target.with_room(problem)
        alone = [simulate(room_for, np.full(graph.num_ops, device)) for device in range(len(speeds))]
        fitting = [step.step_time_ns for step in alone if step.feasible]
        if fitting:
            assert adapted.simulation.feasible
            assert adapted.step_time_ns <= min(fitting)
            if adapted.near is not None:
                assert "All of the model is on" in " ".join(adapted.notes)


def test_equal_cards_hold_as_many_layers() -> None:
    """One layer on a card and three on its twin become two and two: the step is as long."""
    graph, cluster = graph_of("llama"), machine([1.0, 1.0], f"{int(0.9 * HELD_BYTES)}B")
    problem = Problem.build(graph, cluster)
    for name in ("vllm", "llama-cpp"):
        target = find_target(name, context=0) if name == "llama-cpp" else find_target(name)
        units = target.read_units(problem)
        layers = list(target.layers(units))
        devices = np.zeros(units.num_units, np.int64)
        devices[layers[1:]] = 1
        if name == "llama-cpp":
            devices[[unit for unit in range(units.num_units) if unit not in layers][-2:]] = 1
        plan = plan_of(simulate(problem, units.place(devices)), 0, "by hand", 0)
        adapted = adapt(problem, plan, target)
        assert adapted.step_time_ns <= 1.001 * plan.step_time_ns
        assert adapted.devices[layers].tolist() == [0, 0, 1, 1]
        assert adapted.simulation.peak_memory_bytes.max() < plan.peak_memory_bytes.max()


@pytest.mark.parametrize("split", [False, True])
def test_stretches_of_llama_cpp_move_whole_layers(split: bool) -> None:
    """The layers of a device become one run, and a feed-forward part goes with its attention."""
    target = find_target("llama-cpp", context=0, split_layers=split)
    problem = Problem.build(graph_of("llama"), Cluster.parse("2xl4-24g"))
    units = target.read_units(problem)
    numbers = {name: unit for unit, names in enumerate(units.members) for name in names}
    devices = np.zeros(units.num_units, np.int64)
    parts = ("attn", "ffn") if split else ("",)
    for part in parts:
        devices[numbers[".".join(filter(None, ("blk.1", part)))]] = 1
    assert target.arrange is not None
    arranged = target.arrange(problem, units, devices)
    for part in parts:
        here = [int(arranged[numbers[".".join(filter(None, (f"blk.{layer}", part)))]]) for layer in range(4)]
        assert here in ([0, 0, 0, 1], [1, 0, 0, 0])
