"""Residual and dense networks for images, of blocks with drawn branches, gates, shortcuts and skips."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from benchmarks.architectures.families.images import (
    CONV_KINDS,
    RESIZE_KINDS,
    ChannelGate,
    ConvUnit,
    ImageStem,
    ImageStyle,
    Resize,
)
from benchmarks.architectures.families.parts import ClassLoss, Draws, Example

OPS_OF_UNIT = 14  # ops of a step of a ConvUnit, on average


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """Branches of convolutions (kind, size) between an image and the image added to it."""

    branches: tuple[tuple[tuple[str, int], ...], ...]
    join: str  # of branches: "add", or "cat" and a pointwise convolution
    gate: str
    inner: float  # width of the inner convolutions, relative to the outer one
    share: str  # of the branch that is added: "all", "scaled" by a learned number, "none": no shortcut

    @classmethod
    def draw(cls, draws: Draws) -> "BlockPlan":
        """Draws one to four branches of one to three convolutions."""
        kinds = draws.some(CONV_KINDS, draws.number(1, 3))
        branches = tuple(
            tuple((draws.one_of(*kinds), draws.one_of(1, 3, 3, 5, 7)) for _ in range(draws.number(1, 3)))
            for _ in range(draws.one_of(1, 1, 2, 2, 3, 4))
        )
        gate, share = draws.one_of("none", "none", "channels", "pixels"), draws.one_of("all", "all", "scaled", "none")
        return cls(branches, draws.one_of("add", "cat"), gate, draws.one_of(0.25, 0.5, 1.0, 2.0), share)

    @property
    def num_ops(self) -> int:
        """About as many ops as a step of this block has."""
        num_units = sum(map(len, self.branches)) + (self.join == "cat" and len(self.branches) > 1)
        return OPS_OF_UNIT * num_units + {"none": 3, "channels": 22, "pixels": 12}[self.gate] + 6


class DrawnBlock(nn.Module):
    """[batch, inputs, ...] -> [batch, outputs, ...], halved if the stride is 2."""

    def __init__(self, plan: BlockPlan, style: ImageStyle, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.plan = plan
        inner = max(round(outputs * plan.inner / 8), 1) * 8
        self.branches = nn.ModuleList()
        for units in plan.branches:
            widths, strides = [inputs, *([inner] * (len(units) - 1)), outputs], [stride, *(1 for _ in units[1:])]
            layers = zip(pairwise(widths), units, strides, strict=True)
            self.branches.append(nn.Sequential(*(ConvUnit(style, *pair, *unit, step) for pair, unit, step in layers)))
        self.is_cat = plan.join == "cat" and len(plan.branches) > 1
        if self.is_cat:
            self.merge = nn.Conv2d(outputs * len(plan.branches), outputs, 1)
        self.gate = ChannelGate(outputs, plan.gate)
        self.shortcut = Resize(inputs, outputs, stride - 1, "average") if plan.share != "none" else None
        if plan.share == "scaled":
            self.scale = nn.Parameter(torch.full((1,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        parts = [branch(x) for branch in self.branches]
        y = self.merge(torch.cat(parts, dim=1)) if self.is_cat else parts[0]
        for part in [] if self.is_cat else parts[1:]:
            y = y + part
        y = self.gate(y)
        if self.shortcut is None:
            return y
        return self.shortcut(x) + (y * self.scale if self.plan.share == "scaled" else y)


class ResidualTrunk(nn.Module):
    """Images -> [batch, width, ...]: stages of blocks, each with a further sum over every `period` blocks if drawn."""

    def __init__(self, draws: Draws, style: ImageStyle, num_ops: int) -> None:
        super().__init__()
        num_stages = draws.number(2, 4)
        plans = [BlockPlan.draw(draws) for _ in range(draws.one_of(1, 1, num_stages))]
        mean_ops = sum(plan.num_ops for plan in plans) / len(plans)
        num_blocks = max(round(num_ops / mean_ops), num_stages)
        order = sorted(draws.number(0, num_stages - 1) for _ in range(num_blocks - num_stages))
        self.stem = ImageStem(draws, style)
        self.stages = nn.ModuleList()
        width, growth = style.channels, draws.one_of(1.5, 2.0)
        for stage in range(num_stages):
            outputs = max(round(style.channels * growth**stage / 8), 1) * 8
            blocks = nn.ModuleList()
            for position in range(1 + order.count(stage)):
                is_halved = stage > 0 and position == 0
                inputs = width if position == 0 else outputs
                blocks.append(DrawnBlock(plans[stage % len(plans)], style, inputs, outputs, 1 + is_halved))
            self.stages.append(blocks)
            width = outputs
        self.width, self.period = width, draws.one_of(0, 0, 2, 3, 4)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for stage in self.stages:
            assert isinstance(stage, nn.ModuleList)
            earlier = x
            for position, block in enumerate(stage):
                x = block(x)
                if self.period and position % self.period == 0:
                    x = x + earlier if position else x
                    earlier = x
        return x


class DenseTrunk(nn.Module):
    """Images -> [batch, width, ...]: every layer reads a drawn set of the layers before it in its stage."""

    def __init__(self, draws: Draws, style: ImageStyle, num_ops: int) -> None:
        super().__init__()
        num_stages, self.is_sum = draws.number(2, 4), draws.chance(0.3)
        kinds = draws.some(CONV_KINDS, draws.number(1, 2))
        pattern = draws.one_of("powers", "recent", "random", "alternate", "first")
        units_of_layer, span = draws.number(1, 2), draws.number(2, 5)
        num_layers = max(num_ops // (12 * units_of_layer + 4), num_stages)
        growth = draws.size(16, 64)
        self.stem = ImageStem(draws, style)
        self.stages, self.transitions = nn.ModuleList(), nn.ModuleList()
        self.reads: list[list[list[int]]] = []
        width = style.channels
        for stage in range(num_stages):
            count = num_layers // num_stages + (stage < num_layers % num_stages)
            reads = [_reads(draws, pattern, number + 1, span) for number in range(count)]
            widths = [growth if self.is_sum else width]
            self.transitions.append(Resize(width, widths[0], int(stage > 0), draws.one_of(*RESIZE_KINDS)))
            layers = nn.ModuleList()
            for sources in reads:
                inputs = growth if self.is_sum else sum(widths[number] for number in sources)
                units = [ConvUnit(style, inputs, growth, draws.one_of(*kinds), 3)]
                units += [ConvUnit(style, growth, growth, draws.one_of(*kinds), 3) for _ in range(units_of_layer - 1)]
                layers.append(nn.Sequential(*units))
                widths.append(growth)
            self.stages.append(layers)
            self.reads.append(reads)
            width = growth if self.is_sum else sum(widths[-span:])
        self.width, self.span = width, span

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for transition, layers, reads in zip(self.transitions, self.stages, self.reads, strict=True):
            assert isinstance(layers, nn.ModuleList)
            known = [transition(x)]
            for layer, sources in zip(layers, reads, strict=True):
                known.append(layer(self._joined([known[number] for number in sources])))
            x = self._joined(known[-self.span :])
        return x

    def _joined(self, parts: list[Tensor]) -> Tensor:
        if len(parts) == 1:
            return parts[0]
        return torch.stack(parts).sum(0) if self.is_sum else torch.cat(parts, dim=1)


def _reads(draws: Draws, pattern: str, count: int, span: int) -> list[int]:
    """Returns the numbers of the layers that layer `count` reads."""
    if pattern == "powers":
        return [count - 2**power for power in range(count.bit_length()) if 2**power <= count][::-1]
    if pattern == "recent":
        return list(range(max(count - span, 0), count))
    if pattern == "alternate":
        return list(range((count - 1) % 2, count, 2))[-span:]
    if pattern == "first":
        return sorted({0, count - 1})
    return draws.some(range(count), draws.number(1, span))


def draw_trunk(draws: Draws, style: ImageStyle, num_ops: int) -> ResidualTrunk | DenseTrunk:
    """Draws a residual or dense trunk."""
    return ResidualTrunk(draws, style, num_ops) if draws.chance(0.5) else DenseTrunk(draws, style, num_ops)


class ImageClassifier(nn.Module):
    """A trunk and a loss: images, labels [batch] -> loss."""

    def __init__(self, trunk: ResidualTrunk | DenseTrunk, num_classes: int) -> None:
        super().__init__()
        self.trunk, self.head = trunk, ClassLoss(trunk.width, num_classes, bias=True)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return self.head(self.trunk(images).mean((2, 3)), labels)


def build(draws: Draws, num_ops: int, trunk: type[ResidualTrunk] | type[DenseTrunk]) -> Example:
    """Draws a network with this kind of trunk of about `num_ops` ops, with one batch."""
    style, num_classes = ImageStyle.draw(draws), draws.size(10, 1000, 1)
    model = ImageClassifier(trunk(draws, style, num_ops), num_classes)
    return model, (style.images(), torch.randint(num_classes, (style.batch,))), {}
