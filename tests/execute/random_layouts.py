"""Random layouts and placements of steps, and the step that PyTorch itself makes of the same parts of a batch."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gdp import Cluster, Problem, simulate
from gdp.arrays import I64
from gdp.execute.layouts.step_program import StepProgram, step_program
from gdp.graph import Graph
from gdp.graph.layers import LayerPaths
from gdp.models.pytorch import Capture, Replay
from gdp.models.pytorch.cards import as_if_on_a_card
from gdp.models.pytorch.loss import pick_loss
from gdp.models.pytorch.program import named_tensors
from gdp.parallel.layout import BLOCKS, NONE, Layout
from gdp.parallel.step import Step

CLUSTER = Cluster.parse("4xp100-pcie-16g")
MAX_PARTS = 6
LEARNING_RATE = 1e-3  # of all optimizers that `capture` knows by name, but Adafactor
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adam": lambda model: torch.optim.Adam(model.parameters(), LEARNING_RATE, fused=True),
    "sgd-momentum": lambda model: torch.optim.SGD(model.parameters(), LEARNING_RATE, momentum=0.9, fused=True),
}
Parts = Sequence[tuple[tuple[Any, ...], dict[str, Any]]]


@dataclass(frozen=True)
class Drawn:
    """A layout with its rings, and where the ops of its step are."""

    layout: Layout
    num_devices: int
    bucket_bytes: int
    ring: tuple[int, ...] | None
    hosts: tuple[int, ...] | None
    num_places: int  # of a replica, which buckets do not cross
    seed: int  # of places and devices

    @classmethod
    def of(cls, random: np.random.Generator, graph: Graph) -> "Drawn":
        """Draws a layout for the step `graph` of one micro-batch."""
        data = int(random.integers(1, 5))
        zero = int(random.integers(0, 4)) if data > 1 else 0
        if zero == 3 or random.random() < 0.5:
            counts = [int(random.integers(1, max(MAX_PARTS // data, 1) + 1))] * data
        else:
            counts = random.integers(1, 3, data).tolist()
        kind = random.integers(0, 4)  # half of all recompute
        recompute = _blocks(random, graph) if kind < 2 else NONE
        offload = _blocks(random, graph) if kind == 2 and zero < 3 else NONE
        hosts = {1: [0], 2: [0, 1], 3: [0, 1, 2], 4: [0, 0, 1, 1]}[data]
        return cls(
            Layout(tuple(counts), zero, recompute, offload=offload),
            int(random.integers(2, 5)),
            int(random.choice([64, 1000, 2**20])),
            tuple(random.permutation(data).tolist()) if random.random() < 0.7 else None,
            tuple(random.permutation(hosts).tolist()) if random.random() < 0.4 else None,
            int(random.integers(1, 3)),
            int(random.integers(2**31)),
        )

    @property
    def sums_in_order(self) -> bool:
        """True if gradients are summed in the order of PyTorch; of two numbers either order is as good."""
        return self.layout.data == 1 or self.layout.microbatches == (1, 1)

    def step(self, graph: Graph) -> Step:
        """Returns the step of the micro-batch `graph`; ops of a group have one place."""
        random, groups = np.random.default_rng(self.seed), graph.group_index
        places = None if self.num_places == 1 else random.integers(0, self.num_places, groups.max() + 1)[groups]
        return Step.of(
            graph, self.layout, places=places, ring=self.ring, hosts=self.hosts, bucket_bytes=self.bucket_bytes
        )

    def order(self, graph: Graph) -> tuple[I64, ...]:
        """Returns the ops of each device in the order of the machine model; groups are at random places."""
        random, groups = np.random.default_rng(self.seed + 1), graph.group_index
        placement = random.integers(0, self.num_devices, groups.max() + 1)[groups]
        return simulate(Problem.build(graph, CLUSTER), placement).order

    def program(self, found: Capture) -> StepProgram:
        """Returns the program of the step of `found`, the capture of a part of the batch."""
        return step_program(found.program, self.step(found.graph))


def _blocks(random: np.random.Generator, graph: Graph) -> str | tuple[str, ...]:
    """Returns all blocks of a model, or a module or two."""
    layers = LayerPaths.of(graph)
    if any(layers.lists) and random.random() < 0.4:
        return BLOCKS
    modules = zip(graph.modules, graph.phases, graph.flops.tolist(), strict=True)
    known = sorted({module for module, phase, flops in modules if module and phase == "forward" and flops})
    if not known:
        return NONE
    chosen = random.choice(known, min(2, len(known)), replace=False).tolist()
    return tuple(".".join(path.split(".")[: int(random.integers(1, 4))]) for path in chosen)


@dataclass
class Unplaced:
    """The replicas of a model, trained by PyTorch on the parts of a batch; R replicas."""

    replicas: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]
    magnitude: dict[str, Tensor] = field(default_factory=dict)  # of each gradient: the sum over parts of its sizes

    @classmethod
    def of(cls, model: nn.Module, num_replicas: int, optimizer: str) -> "Unplaced":
        """Copies `model`."""
        replicas = [copy.deepcopy(model) for _ in range(num_replicas)]
        return cls(replicas, [OPTIMIZERS[optimizer](replica) for replica in replicas])

    def step(self, parts: Parts, microbatches: Sequence[int]) -> Replay:
        """Trains on `parts`, of which each replica has its `microbatches` [R]; returns what the first replica has."""
        following, losses, outputs, total = iter(parts), list[Tensor](), dict[str, Tensor](), dict[str, Tensor]()
        self.magnitude = {}
        for replica, count in zip(self.replicas, microbatches, strict=True):
            replica.zero_grad()
            for _ in range(count):
                args, kwargs = next(following)
                before = {name: gradient.clone() for name, gradient in _gradients(replica)}
                with as_if_on_a_card():  # a captured step has the kernels of cards
                    output = replica(*args, **kwargs)
                    loss = pick_loss(output, None, "the model")
                    (loss / len(parts)).backward()
                outputs |= {f"{name}@{len(losses)}": item.detach() for name, item in named_tensors(output, "")}
                losses.append(loss.detach())
                for name, gradient in _gradients(replica):
                    size = (gradient - before[name]).abs() if name in before else gradient.abs()
                    self.magnitude[name] = self.magnitude.get(name, torch.zeros_like(gradient)) + size
            for name, gradient in _gradients(replica):
                total[name] = total[name] + gradient if name in total else gradient.clone()
        for replica, optimizer in zip(self.replicas, self.optimizers, strict=True):
            for name, parameter in replica.named_parameters():
                if name in total:
                    parameter.grad = total[name].clone()
            optimizer.step()
        return Replay(torch.stack(losses).mean(), outputs, total, self.replicas[0].state_dict())


def _gradients(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            yield name, parameter.grad
