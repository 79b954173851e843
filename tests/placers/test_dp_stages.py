"""Stages by dynamic programming: the least bottleneck of all cuts."""

import itertools

import numpy as np
import pytest

from gdp.cluster import Cluster
from gdp.graph import Graph, Op, Tensor
from gdp.placers.contiguous import Chain
from gdp.placers.dp_stages import _cut_times, least_bottleneck
from gdp.simulator.problem import Problem
from gdp.units.units import Units


def chain_problem(seed: int) -> Problem:
    """A random graph of 7 ops on three unequal devices with slow links; large tensors skip ops at times."""
    rng = np.random.default_rng(seed)
    ops = [
        Op(f"op{op}", flops=int(rng.integers(1, 9)) * 10**10, resident_bytes=int(rng.integers(0, 5)) * 2**30)
        for op in range(7)
    ]
    edges = {(op, op + 1) for op in range(6)} | {tuple(sorted(rng.choice(7, 2, replace=False).tolist())) for _ in "ab"}
    tensors = [Tensor(a, (b,), int(rng.integers(0, 3)) * 10**8) for a, b in sorted(edges)]
    return Problem.build(Graph.build("chain", ops, tensors), Cluster.parse("rtx4090-24g+2xl4-24g"))


def bottleneck(problem: Problem, devices: np.ndarray, ends: tuple[int, ...]) -> float:  # type: ignore[type-arg]
    """What `least_bottleneck` minimises, from the definition; infinite where resident bytes do not fit."""
    units = Units.of(problem)
    cut_ns = _cut_times(problem, units, np.arange(7), devices)
    worst, begin = 0.0, 0
    for stage, end in enumerate(ends):
        if units.resident_bytes[begin:end].sum() > problem.memory_limit_bytes[devices[stage]]:
            return np.inf
        worst = max(worst, float(units.time_ns[begin:end, devices[stage]].sum()))
        if stage < len(ends) - 1 and 0 < end < 7:
            worst = max(worst, float(cut_ns[stage, end]))
        begin = end
    return worst


@pytest.mark.parametrize("seed", range(25))
def test_no_other_cuts_have_a_smaller_bottleneck(seed: int) -> None:
    """Brute force over all cuts of the chain finds no smaller bottleneck, on all devices and on two of them."""
    problem = chain_problem(seed)
    units, chain = Units.of(problem), Chain(np.arange(7))
    for devices in (np.array([0, 1, 2]), np.array([1, 0]), np.array([2])):
        every = [(*cuts, 7) for cuts in itertools.combinations_with_replacement(range(8), len(devices) - 1)]
        best = min(bottleneck(problem, devices, ends) for ends in every)
        chosen = least_bottleneck(problem, units, chain, devices)
        position = np.array([devices.tolist().index(device) for device in chosen.tolist()])
        assert (np.diff(position) >= 0).all()
        ends = tuple(int((position <= stage).sum()) for stage in range(len(devices)))
        if np.isfinite(best):
            assert bottleneck(problem, devices, ends) <= best * (1 + 1e-9)


def test_a_block_is_not_cut() -> None:
    """Units of a block stay together, even where a cut through it would balance better."""
    problem = chain_problem(0)
    block = np.array([0, 0, 0, 1, 1, 1, 1])
    chosen = least_bottleneck(problem, Units.of(problem), Chain(np.arange(7), block), np.array([1, 2]))
    assert all(len(set(chosen[block == number].tolist())) == 1 for number in (0, 1))
