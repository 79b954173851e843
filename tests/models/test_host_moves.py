"""Tensors that a model sends to the host wait there, and come back over the link."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import gdp
from gdp.graph import Graph
from gdp.graph.copies import HOST_COPY
from gdp.models.pytorch import capture, capture_fn
from gdp.models.pytorch.cards import NOTE
from gdp.placers.base import single
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import simulate

ROWS, WIDTH = 256, 64
ROWS_BYTES = 4 * ROWS * WIDTH
WEIGHT_BYTES = 4 * WIDTH * WIDTH
BOTH = "h100-sxm-80g+cpu-16core"


class Mover(nn.Module):
    """Two products, with `move` between them."""

    def __init__(self, move: Callable[["Mover", Tensor], Tensor]) -> None:
        super().__init__()
        self.move = move
        self.first, self.second = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Returns the second product."""
        return self.second(self.move(self, self.first(x)))


def _pinned(_net: Mover, x: Tensor) -> Tensor:
    memory = torch.empty(x.shape, pin_memory=True)
    memory.copy_(x, non_blocking=True)
    return memory.to(x.device, non_blocking=True)


def _built(move: Callable[..., Tensor]) -> Callable[[], tuple[Any, ...]]:
    return lambda: (Mover(move).to("cuda"), (torch.ones(ROWS, WIDTH, device="cuda"),))


def _moved_bytes(graph: Graph) -> tuple[int, int]:
    """Returns the bytes that are sent to the host, and those that come back."""
    producers, consumers = graph.producers[graph.edge_tensors], graph.consumers
    is_host = graph.is_in_role(HOST_COPY)
    sizes = graph.tensor_bytes[graph.edge_tensors]
    sent, fetched = ~is_host[producers] & is_host[consumers], is_host[producers] & ~is_host[consumers]
    return int(sizes[sent].sum()), int(np.unique(graph.edge_tensors[fetched]).size and sizes[fetched].sum())


@pytest.mark.parametrize(
    "move",
    [
        lambda _net, x: x.cpu().cuda(),
        lambda _net, x: x.to("cpu").to(x.device),
        lambda net, x: x.to(device=torch.device("cpu"), non_blocking=True).to(net.second.weight),
        lambda net, x: x.cpu().view(-1, WIDTH).to(next(net.parameters()).device),
        _pinned,
    ],
)
def test_moves_in_a_model(move: Callable[..., Tensor]) -> None:
    """A tensor that goes to the host and back is sent once each way; its gradient takes the same ways."""
    captured = capture_fn(_built(move), training=False)
    assert _moved_bytes(captured.graph) == (ROWS_BYTES, ROWS_BYTES)
    assert captured.graph.flops.sum() == 2 * 2 * ROWS * WIDTH * WIDTH


def test_moves_in_training() -> None:
    """The gradient goes to the host and back; the second product reads what it has fetched again in its backward."""
    captured = capture_fn(_built(lambda _net, x: x.cpu().cuda()))
    assert NOTE in captured.notes
    assert _moved_bytes(captured.graph) == (2 * ROWS_BYTES, 3 * ROWS_BYTES)  # fetched by two products, and a gradient


@pytest.mark.parametrize(
    "move",
    [
        lambda _net, x: x,
        lambda _net, x: x.to(x.device),
        lambda net, x: x.to(net.first.weight).cuda(),
        lambda net, x: x.to(next(net.parameters()).device, torch.float32),
    ],
)
def test_no_moves(move: Callable[..., Tensor]) -> None:
    """What stays on the card makes no copies."""
    assert not capture_fn(_built(move), training=False).graph.is_in_role(HOST_COPY).any()


def _layers(context: Callable[[], Any]) -> Callable[[], tuple[Any, ...]]:
    class Layers(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            with context():
                return super().forward(x)

    layers = [part for _ in range(4) for part in (nn.Linear(WIDTH, WIDTH, bias=False), nn.GELU())]
    return lambda: (Layers(*layers), (torch.ones(ROWS, WIDTH),))


@pytest.mark.parametrize(
    "context",
    [
        save_on_cpu,
        lambda: save_on_cpu(pin_memory=True),
        lambda: saved_tensors_hooks(lambda x: (x.device, x.to("cpu")), lambda pair: pair[1].to(pair[0])),
        lambda: saved_tensors_hooks(lambda x: x.cpu(), lambda x: x),
    ],
)
def test_hooks_of_saved_tensors(context: Callable[[], Any]) -> None:
    """Saved tensors wait on the CPU: inputs of products and GELUs, and the weights that gradients pass through."""
    captured = capture_fn(_layers(context))
    saved = 4 * 2 * ROWS_BYTES + 3 * WEIGHT_BYTES  # no gradient passes through the first weight
    assert _moved_bytes(captured.graph) == (saved, saved)
    problem = Problem.build(captured.graph, BOTH)
    is_host = captured.graph.is_in_role(HOST_COPY)
    assert problem.allowed[~is_host].all()
    assert not problem.allowed[is_host, 0].any()
    peak = simulate(problem, np.where(is_host, 1, 0)).peak_memory_bytes
    state = 4 * 3 * WEIGHT_BYTES  # parameters and two moments
    assert peak[1] == saved
    # the last GELU's backward pass: its input, the gradients of its output and input; no other activation is held
    assert state + 3 * ROWS_BYTES <= peak[0] < state + 4 * WEIGHT_BYTES + 4 * ROWS_BYTES


def test_moves_without_a_cpu() -> None:
    """Copies stay on the card where there is no CPU; a pin to a card is stronger than their place."""
    graph = capture_fn(_built(lambda _net, x: x.cpu().cuda()), training=False).graph
    assert Problem.build(graph, "2xh100-sxm-80g").allowed.all()
    pinned = Problem.build(graph, BOTH, pins=[(".", "gpu0")])
    assert pinned.allowed[:, 0].all()
    assert not pinned.allowed[:, 1].any()


def test_one_card_beside_a_cpu() -> None:
    """All on one device means the card for all but the copies, where the CPU may not have the products."""
    graph = capture_fn(_built(lambda _net, x: x.cpu().cuda()), training=False).graph
    problem = Problem.build(graph, BOTH, forbid=[("mm", "cpu0")])
    placement = single(problem)
    assert placement is not None
    assert (placement == problem.graph.is_in_role(HOST_COPY)).all()


def test_replicas_with_moves() -> None:
    """A layout has the copies of each replica on the CPU, whether that computes too or not."""
    step = gdp.place(_layers(save_on_cpu)(), f"2x{BOTH}", parallel="data=2", budget="20sims")
    assert step.problem is not None
    is_host = step.problem.graph.is_in_role(HOST_COPY)
    assert is_host.sum() == 2 * 2 * 11  # replicas, ways, tensors
    assert (step.placement[is_host] == 2).all()
    assert len(set(step.placement[~is_host].tolist())) == 2


def test_execution_of_moves() -> None:
    """The program computes what the model does, gradients included."""
    module, inputs = Mover(lambda _net, x: x.cpu().relu().to(x.device)), (torch.randn(ROWS, WIDTH),)
    replay = capture(module, inputs).program.replay(module, inputs)
    loss = module(*inputs).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    assert replay.loss == loss
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(replay.gradients[name], parameter.grad)
