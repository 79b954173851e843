"""Copies of recomputation, run by worker threads, give the bits of the step without them."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from gdp import Cluster, Problem, simulate
from gdp.execute.backends import CPU, Target
from gdp.execute.host_executor import ThreadExecutor
from gdp.execute.layouts.step_program import with_copies
from gdp.models.pytorch import capture
from gdp.parallel.blocks import Blocks
from gdp.parallel.recompute import Recomputation
from gdp.units.units import forward_units
from tiny_models import TINY


class InPlace(nn.Module):
    """Overwrites its input and counts in a buffer; what reads either cannot run again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + 1.0
        self.count += 1
        x *= 2.0
        return functional.gelu(self.linear(functional.gelu(y + x) * self.count.clone()))


class Spectral(nn.Module):
    """Improves an estimate of its norm, a buffer, in each pass, and divides by the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.gelu(self.linear(x))


class Three(nn.Module):
    """Three layers, run twice."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(layer() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.first(x), self.first(x * 2.0)
        for layer in self.layers:
            a, b = layer(a), layer(b)
        return (a.square() - b).mean()


CLUSTER = Cluster.parse("3xp100-pcie-16g")


@pytest.mark.parametrize("name", ["gpt2", "resnet"])  # one draws dropout, the other one writes running statistics
def test_recomputed_steps_give_the_same_bits(name: str) -> None:
    """Loss, gradients, parameters and buffers are equal on three threads, with ops placed at random."""
    model, args, kwargs = TINY[name]()
    found = capture(model, args, kwargs, name=name)
    expected = found.program.replay(model, args, kwargs)
    step = Recomputation.of(Blocks.of(found.graph, "blocks"))
    program = with_copies(found.program, step)
    copies = [op for op, op_name in enumerate(program.graph.op_names) if op_name.endswith("!")]
    assert any(call.seed >= 0 for op in copies for call in program.calls[op]) == (name == "gpt2")
    assert any("batch_norm" in program.graph.kinds[op] for op in copies) == (name == "resnet")
    random, groups = np.random.default_rng(0), program.graph.group_index
    placement = random.integers(0, 3, groups.max() + 1)[groups]
    order = simulate(Problem.build(program.graph, CLUSTER), placement).order
    content = program.bind(model, args, kwargs)
    with ThreadExecutor(program, order, [Target(f"cpu{number}", CPU) for number in range(3)]) as executor:
        executor.load(content)
        results = executor.results(executor.step(content, retain=True))
    assert results.loss is not None
    assert torch.equal(results.loss, expected.loss)
    for here, there in ((results.gradients, expected.gradients), (results.state, expected.state)):
        assert here.keys() == there.keys()
        for key in here:
            assert torch.equal(here[key], there[key]), key


@pytest.mark.parametrize("layer", [InPlace, Spectral, lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))])
def test_layers_that_overwrite_their_inputs(layer: Callable[[], nn.Module]) -> None:
    """Layers that overwrite their inputs give the same bits when they are recomputed."""
    model, args = Three(layer), (torch.randn(4, 8),)
    found = capture(model, args, name="three")
    step = Recomputation.of(Blocks.of(found.graph, "blocks"))
    assert step.graph.num_ops > found.graph.num_ops
    expected, results = (program.replay(model, args) for program in (found.program, with_copies(found.program, step)))
    for here, there in ((results.gradients, expected.gradients), (results.state, expected.state)):
        assert all(torch.equal(here[key], there[key]) for key in there)


def test_backward_ops_follow_the_same_ops() -> None:
    """Backward ops follow the same forward ops with and without copies."""
    graph = capture(*TINY["gpt2"](), name="gpt2").graph
    step = Recomputation.of(Blocks.of(graph, "blocks"))
    units = forward_units(Problem.build(step.graph, CLUSTER))
    is_original = [not name.endswith("!") for name in step.graph.op_names]
    pairs = set(zip(units[is_original].tolist(), forward_units(Problem.build(graph, CLUSTER)).tolist(), strict=True))
    assert len(pairs) == len({here for here, _ in pairs}) == len({there for _, there in pairs})
