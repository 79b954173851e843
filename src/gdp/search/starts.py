"""Starts for a search: METIS partitions of different views of the graph.

A view combines: units alone, or backward ops with their forward ops; all tensors, or none with many consumers (weights
shared by all time steps tie a layer together; without them, time steps part); exact or perturbed weights of edges;
METIS' own settings. A partition takes milliseconds.
"""

import numpy as np

from gdp.arrays import I64
from gdp.budget import Clock
from gdp.placers.base import device_subsets
from gdp.placers.metis import Partitioner, partition_s
from gdp.simulator.problem import Placement, Problem

_MAX_CONSUMERS = (None, 8, 3)
_IMBALANCES = (30, 100, 300, 1000)


def diverse_starts(problem: Problem, followers: I64, num_starts: int, seed: int, clock: Clock) -> list[Placement]:
    """Returns up to `num_starts` placements [N] that obey groups and allowed devices, fewer when time is up.

    `followers` [N] are the units in which backward ops follow their forward ops (`forward_units`).
    """
    rng = np.random.default_rng(np.random.SeedSequence([seed, 0x57A275]))
    subsets = device_subsets(problem, smallest=2)
    starts: list[Placement] = []
    seconds = partition_s(problem, problem.num_devices)
    while len(starts) < num_starts and clock.has(seconds):
        partitioner = Partitioner(
            problem,
            followers if rng.random() < 0.5 else None,
            _MAX_CONSUMERS[rng.integers(len(_MAX_CONSUMERS))],
            rng if rng.random() < 0.5 else None,
        )
        devices = subsets[0] if rng.random() < 0.7 else subsets[rng.integers(len(subsets))]
        imbalance = _IMBALANCES[rng.integers(len(_IMBALANCES))]
        starts.append(partitioner.partition(devices, imbalance, bool(rng.random() < 0.5), int(rng.integers(2**31))))
    return starts
