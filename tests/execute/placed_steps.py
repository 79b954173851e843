"""Random placements of captured steps on cores, their results, and a small step."""

import numpy as np
import torch
from torch import Tensor, nn

from gdp import Cluster, Problem, simulate
from gdp.execute.backends import CPU, Target
from gdp.models.pytorch import Capture, Replay, capture
from gdp.simulator.simulate import Simulation

CLUSTER = Cluster.parse("4xp100-pcie-16g")


def randomly_placed(found: Capture, num_devices: int, seed: int) -> Simulation:
    """The step with its ops on random devices, groups kept, each device's ops in the order of the machine model."""
    random, groups = np.random.default_rng(seed), found.graph.groups
    placement = random.integers(0, num_devices, found.graph.num_ops)
    for group in set(groups[groups >= 0].tolist()):
        placement[groups == group] = placement[groups == group][0]
    return simulate(Problem.build(found.graph, CLUSTER), placement)


class Tower(nn.Module):
    """A few products, each of which waits for the one before."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def tower() -> tuple[Capture, dict[int, Tensor]]:
    """Returns the captured step of a tower, and what it starts from."""
    model, x = Tower(), torch.rand(8, 64)
    found = capture(model, [x], name="tower")
    return found, found.program.bind(model, [x], {})


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


torch.library.define("gdp_tests::has_no_kernel", "(Tensor x) -> Tensor")
torch.library.register_fake("gdp_tests::has_no_kernel", lambda x: torch.empty_like(x))
