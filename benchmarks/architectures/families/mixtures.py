"""Mixtures of the families: sources of steps (images, tokens, frames, tables), bodies of several kinds, heads; towers.

source -> body -> body -> heads                      a mixture
source -> body --.
source -> body ---> merged -> head                   towers, one of which may be used for several sources
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.architectures.families.images import ImageStyle
from benchmarks.architectures.families.parts import ClassLoss, Draws, Example, PlainMLP, ValueLoss
from benchmarks.architectures.families.recurrent import RecurrentStack, StackPlan
from benchmarks.architectures.families.residual import DenseTrunk, ResidualTrunk, draw_trunk
from benchmarks.architectures.families.tables import TableBag
from benchmarks.architectures.families.transformers import StepEmbeddings, TransformerPlan, TransformerStack

SOURCES = ("images", "images", "tokens", "frames", "tables")
BODIES = ("transformer", "experts", "recurrent", "waves", "perceptrons")


class ImageSteps(nn.Module):
    """Images -> [batch, num_steps, width], through a convolutional trunk; pixels are averaged to steps."""

    def __init__(self, trunk: ResidualTrunk | DenseTrunk, width: int, num_steps: int) -> None:
        super().__init__()
        self.trunk, self.num_steps = trunk, num_steps
        self.project = nn.Linear(trunk.width, width)

    def forward(self, images: Tensor) -> Tensor:
        pixels = self.trunk(images).flatten(2)
        return self.project(functional.adaptive_avg_pool1d(pixels, self.num_steps).transpose(1, 2))


class TableSteps(nn.Module):
    """Rows [batch, tables, bag] -> [batch, tables, width]."""

    def __init__(self, draws: Draws, num_rows: Sequence[int], width: int) -> None:
        super().__init__()
        inner = draws.one_of(width, 32, 64)
        self.tables = nn.ModuleList(TableBag(rows, inner, width, "sum") for rows in num_rows)

    def forward(self, numbers: Tensor) -> Tensor:
        return torch.stack([table(rows) for table, rows in zip(self.tables, numbers.unbind(1), strict=True)], dim=1)


@dataclass(frozen=True, eq=False)
class Source:
    """A module that makes steps, and its input."""

    module: nn.Module
    inputs: Tensor
    num_steps: int

    @classmethod
    def draw(cls, draws: Draws, kind: str, num_ops: float, batch: int, width: int) -> "Source":
        """Draws a source of `kind`: steps [batch, num_steps, width]."""
        if kind == "images":
            style = replace(ImageStyle.draw(draws, max_size=128, max_channels=64), batch=batch)
            trunk = draw_trunk(draws, style, max(int(num_ops), 60))
            num_steps = 8 * draws.number(1, 2)
            return cls(ImageSteps(trunk, width, num_steps), style.images(), num_steps)
        if kind == "tables":
            num_steps = 8 * max(round(num_ops / (8 * 13)), 1)
            rows = [draws.size(100, 500_000, 1) for _ in range(num_steps)]
            numbers = torch.randint(min(rows), (batch, num_steps, draws.number(1, 6)))
            return cls(TableSteps(draws, rows, width), numbers, num_steps)
        num_steps, has_tokens = 8 * draws.number(1, 12), kind == "tokens"
        inputs = draws.size(500, 30000, 100) if has_tokens else draws.size(16, 512)
        module = StepEmbeddings(inputs, width, num_steps, has_tokens=has_tokens)
        shape = batch, num_steps
        return cls(module, torch.randint(inputs, shape) if has_tokens else torch.randn(*shape, inputs), num_steps)


def _share_of_source(draws: Draws, kind: str) -> float:
    """Draws the share of a model's ops that its source has; embeddings of steps have few."""
    return float(draws.rng.uniform(0.2, 0.7)) if kind in ("images", "tables") else 0.0


class RecurrentBody(nn.Module):
    """[batch, steps, width] -> the same shape, through a recurrent stack over means of every `stride` steps."""

    def __init__(self, draws: Draws, num_ops: float, width: int, num_steps: int) -> None:
        super().__init__()
        plan = StackPlan.draw(draws, max_layers=3)
        self.stride = 1
        while self.stride < 8 and plan.ops_per_step * (num_steps // self.stride) > num_ops:
            self.stride *= 2
        self.stack = RecurrentStack(plan, width, draws.one_of(0.0, 0.1), is_additive=draws.chance(0.5))

    def forward(self, x: Tensor) -> Tensor:
        short = x.view(len(x), -1, self.stride, x.shape[2]).mean(2) if self.stride > 1 else x
        states = torch.stack(self.stack(short.unbind(1)), dim=1)
        return x + (states.repeat_interleave(self.stride, dim=1) if self.stride > 1 else states)


class WaveBody(nn.Module):
    """[batch, steps, width] -> the same shape, through gated convolutions over steps, each summed into the output."""

    def __init__(self, draws: Draws, num_ops: float, width: int) -> None:
        super().__init__()
        cycle, self.is_gated, self.is_summed = draws.number(1, 3), draws.chance(0.5), draws.chance(0.5)
        count = max(round(num_ops / (32 if self.is_gated else 20)), 1)
        outputs = 2 * width if self.is_gated else width
        self.convs = nn.ModuleList(
            nn.Conv1d(width, outputs, 3, padding=2 ** (number % cycle), dilation=2 ** (number % cycle))
            for number in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = x.transpose(1, 2)
        total = y
        for conv in self.convs:
            z = functional.glu(conv(y), dim=1) if self.is_gated else conv(y).relu()
            y = y + z
            total = total + z if self.is_summed else y
        return total.transpose(1, 2)


class PerceptronBody(nn.Module):
    """[batch, steps, width] -> the same shape, through one perceptron for all steps or one for each few."""

    def __init__(self, draws: Draws, num_ops: float, width: int, num_steps: int) -> None:
        super().__init__()
        self.num_parts = draws.one_of(1, 2, 4, 8) if num_steps % 8 == 0 else 1
        depth = max(round(num_ops / (14 * self.num_parts)), 1)
        act = draws.one_of("relu", "gelu", "silu")
        self.parts = nn.ModuleList(
            PlainMLP([width] * (depth + 1), act, norm="layer", residual=True) for _ in range(self.num_parts)
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = zip(self.parts, x.chunk(self.num_parts, dim=1), strict=True)
        return torch.cat([module(part) for module, part in parts], dim=1) if self.num_parts > 1 else self.parts[0](x)


def draw_body(draws: Draws, kind: str, num_ops: float, width: int, num_steps: int) -> nn.Module:
    """Draws a body of `kind`: [batch, num_steps, width] -> the same shape."""
    if kind == "recurrent":
        return RecurrentBody(draws, num_ops, width, num_steps)
    if kind == "waves":
        return WaveBody(draws, num_ops, width)
    if kind == "perceptrons":
        return PerceptronBody(draws, num_ops, width, num_steps)
    plan = replace(TransformerPlan.draw(draws), width=width, num_heads=8, inner=2 * width)
    return TransformerStack(plan.with_experts(draws) if kind == "experts" else plan, num_ops, num_steps)


class Mixture(nn.Module):
    """Inputs, classes [batch], values [batch, outputs] -> the sum of the losses of all heads."""

    def __init__(
        self, source: nn.Module, bodies: Sequence[nn.Module], heads: Sequence[nn.Module], taps: Sequence[int]
    ) -> None:
        super().__init__()
        self.source, self.bodies, self.heads = source, nn.ModuleList(bodies), nn.ModuleList(heads)
        self.taps = list(taps)  # the body that each head reads

    def forward(self, inputs: Tensor, classes: Tensor, values: Tensor) -> Tensor:
        states = [self.source(inputs)]
        for body in self.bodies:
            states.append(body(states[-1]))
        means = [state.mean(1) for state in states[1:]]
        losses = [
            head(means[tap], classes if isinstance(head, ClassLoss) else values)
            for head, tap in zip(self.heads, self.taps, strict=True)
        ]
        return sum(losses[1:], losses[0])


def build_mixture(draws: Draws, num_ops: int) -> Example:
    """Draws a mixture of about `num_ops` ops, with one batch."""
    batch, width = draws.size(64, 512), draws.size(128, 1024, 64)
    kinds = [draws.one_of(*BODIES) for _ in range(draws.number(1, 3))]
    source_kind = draws.one_of(*SOURCES)
    source_ops = num_ops * _share_of_source(draws, source_kind)
    source = Source.draw(draws, source_kind, source_ops, batch, width)
    shares = draws.rng.dirichlet([3.0] * len(kinds)) * (num_ops - source_ops)
    bodies = [draw_body(draws, kind, share, width, source.num_steps) for kind, share in zip(kinds, shares, strict=True)]
    num_classes, num_values = draws.size(10, 2000, 1), draws.number(1, 16)
    heads: list[nn.Module] = []
    for _ in range(draws.one_of(1, 1, 2, 3)):
        is_smooth = draws.chance(0.5)
        head = ValueLoss(width, num_values, is_smooth=is_smooth) if draws.chance(0.4) else ClassLoss(width, num_classes)
        heads.append(head)
    taps = [len(bodies) - 1, *(draws.number(0, len(bodies) - 1) for _ in heads[1:])]
    model = Mixture(source.module, bodies, heads, taps)
    return model, (source.inputs, torch.randint(num_classes, (batch,)), torch.randn(batch, num_values)), {}


class Towers(nn.Module):
    """Targets [batch], then the inputs of each tower -> loss.

    The towers' means are compared with each other, joined by a perceptron, or multiplied and added up.
    """

    def __init__(self, towers: Sequence[nn.Module], merge: str, width: int, num_classes: int) -> None:
        super().__init__()
        self.towers, self.merge = nn.ModuleList(towers), merge
        if merge == "perceptron":
            self.join = PlainMLP([width * len(towers), 2 * width, width], "gelu", norm="layer")
        elif merge == "product":
            self.maps = nn.ModuleList(nn.Linear(width, width) for _ in towers)
        elif merge == "attention":
            self.attend = nn.MultiheadAttention(width, 8, batch_first=True)
        self.loss = ClassLoss(width, num_classes)

    def forward(self, targets: Tensor, *inputs: Tensor) -> Tensor:
        states = [tower(x) for tower, x in zip(self.towers, inputs, strict=True)]
        if self.merge == "attention":
            first, *others = states
            memory = torch.cat(others, dim=1)
            return self.loss(self.attend(first, memory, memory, need_weights=False)[0].mean(1), targets)
        means = [state.mean(1) for state in states]
        if self.merge == "perceptron":
            return self.loss(self.join(torch.cat(means, dim=1)), targets)
        if self.merge == "product":
            total = self.maps[0](means[0])
            for layer, mean in zip(list(self.maps)[1:], means[1:], strict=True):
                total = total * layer(mean).sigmoid()
            return self.loss(total, targets)
        first, *others = (functional.layer_norm(mean, mean.shape[-1:]) for mean in means)
        samples = torch.arange(len(first), device=first.device)
        losses = [functional.cross_entropy(first @ other.t() * 0.05, samples) for other in others]
        return sum(losses, self.loss(first, targets))


def build_towers(draws: Draws, num_ops: int) -> Example:
    """Draws two or three towers of about `num_ops` ops together, with one batch; equal ones may share weights."""
    batch, width, num_classes = draws.size(64, 512), draws.size(128, 768, 64), draws.size(10, 1000, 1)
    count = draws.one_of(2, 2, 3)
    merge = draws.one_of("perceptron", "product", "attention", "comparison")
    shares = draws.rng.dirichlet([4.0] * count) * num_ops
    towers: list[nn.Module] = []
    inputs: list[Tensor] = []
    for number in range(count):
        if number and draws.chance(0.2):
            towers.append(towers[-1])
            inputs.append(inputs[-1].clone())
            continue
        kind = draws.one_of(*SOURCES)
        share = _share_of_source(draws, kind)
        source = Source.draw(draws, kind, shares[number] * share, batch, width)
        body = draw_body(draws, draws.one_of(*BODIES), shares[number] * (1 - share), width, source.num_steps)
        towers.append(nn.Sequential(OrderedDict(source=source.module, body=body)))
        inputs.append(source.inputs)
    return Towers(towers, merge, width, num_classes), (torch.randint(num_classes, (batch,)), *inputs), {}
