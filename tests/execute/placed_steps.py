"""Random placements of captured steps on cores, and their results."""

import numpy as np
import torch

from gdp import Cluster, Problem, simulate
from gdp.execute.targets import CPU, Target
from gdp.models.pytorch import Capture, Replay
from gdp.simulator.simulate import Simulation

CLUSTER = Cluster.parse("4xp100-pcie-16g")


def randomly_placed(found: Capture, num_devices: int, seed: int) -> Simulation:
    """The step with its ops on random devices, groups kept, each device's ops in the order of the machine model."""
    random, groups = np.random.default_rng(seed), found.graph.groups
    placement = random.integers(0, num_devices, found.graph.num_ops)
    for group in set(groups[groups >= 0].tolist()):
        placement[groups == group] = placement[groups == group][0]
    return simulate(Problem.build(found.graph, CLUSTER), placement)


def cpus(count: int = 4) -> list[Target]:
    return [Target(f"cpu{number}", CPU) for number in range(count)]


def assert_same(found: Replay, expected: Replay) -> None:
    for kind in ("outputs", "gradients", "state"):
        here, there = getattr(found, kind), getattr(expected, kind)
        assert here.keys() == there.keys()
        for name in here:
            assert torch.equal(here[name], there[name]), f"{kind} {name}"
    if expected.loss is not None:
        assert torch.equal(found.loss, expected.loss)
