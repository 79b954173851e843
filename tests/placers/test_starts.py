"""Grids of layers and calls, on a chain of layers that is called several times."""

import numpy as np
import pytest

from gdp.cluster import Cluster
from gdp.graph import Graph, Op, Tensor
from gdp.graph.accumulation import accumulated
from gdp.placers.starts import call_grids
from gdp.simulator.problem import Problem
from problems import CASES, heavy_layers

LAYERS, CALLS = 2, 4


def called_layers(num_calls: int = CALLS) -> Graph:
    """Each layer's result goes to the next layer and to its own next call; each layer has a parameter."""
    ops = [
        Op(f"layers.{layer}.weight", "parameter", resident_bytes=2**20, module=f"layers.{layer}")
        for layer in range(LAYERS)
    ]
    number = {}
    for call in range(num_calls):
        for layer in range(LAYERS):
            number[layer, call] = len(ops)
            ops.append(Op(f"layers.{layer}.mm_{call}", "mm", 10**9, phase="forward", module=f"layers.{layer}"))
    tensors = [Tensor(layer, tuple(number[layer, call] for call in range(num_calls)), 2**20) for layer in range(LAYERS)]
    for (layer, call), op in number.items():
        readers = [number[next_] for next_ in ((layer + 1, call), (layer, call + 1)) if next_ in number]
        tensors += [Tensor(op, tuple(sorted(readers)), 2**10)] if readers else []
    return Graph.build("called layers", ops, tensors)


def test_calls_and_layers_are_cut() -> None:
    """On 2 x 2 devices each has one layer in two calls, on 1 x 4 both layers in one call; parameters are shared out."""
    two, four = call_grids(Problem.build(called_layers(), "4xp100-pcie-16g"))
    calls, layers = np.divmod(np.arange(LAYERS * CALLS), LAYERS)
    assert two[LAYERS:].tolist() == (calls // 2 * 2 + layers).tolist()
    assert four[LAYERS:].tolist() == calls.tolist()
    assert sorted(set(four[:LAYERS].tolist())) == [1, 3]


def test_unequal_devices_take_calls_in_proportion() -> None:
    """One card of nearly twice the speed has two of three calls."""
    fast_and_slow = Cluster.parse("v100-sxm-32g+p100-pcie-16g")
    (placement,) = call_grids(Problem.build(called_layers(6), fast_and_slow))
    on_fast = int((placement[LAYERS:] == 0).sum())
    assert LAYERS * 3 < on_fast < LAYERS * 6


@pytest.mark.parametrize("name", CASES)
def test_grids_obey_constraints(name: str) -> None:
    """Placements by grids keep groups and allowed devices."""
    problem = CASES[name].problem()
    for placement in call_grids(problem):
        assert problem.broken_constraints(placement) == []


def test_steps_without_grids() -> None:
    """Layers that are called once and micro-batches have no grids."""
    assert call_grids(Problem.build(heavy_layers(), "4xp100-pcie-16g")) == []
    assert call_grids(Problem.build(accumulated(called_layers(), 2), "4xp100-pcie-16g")) == []
