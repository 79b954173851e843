"""Convolutional networks of drawn cells: a stem, then normal and reduction cells, each a drawn acyclic graph."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.architectures.families.images import ConvUnit, ImageStem, ImageStyle, Resize
from benchmarks.architectures.families.parts import ClassLoss, Draws, Example, WeightedSum

_OPS_OF: Mapping[str, int] = MappingProxyType(
    {
        "identity": 0,
        "average": 3,
        "maximum": 3,
        "pointwise": 10,
        "conv": 11,
        "grouped": 11,
        "dilated": 11,
        "separable": 15,
        "factored": 15,
    }
)
"""About as many ops as a step has for each operation: forward, backward, parameters and updates."""
_JOINS = ("add", "mean", "maximum", "product", "weighted")

Edge = tuple[int, str, int]
"""The number of the node that is read, the operation, and its size in pixels."""


@dataclass(frozen=True, slots=True)
class DrawnCellPlan:
    """The graph of a cell: inputs are numbered first, then nodes; nodes that nothing reads are the output."""

    num_inputs: int
    nodes: tuple[tuple[str, tuple[Edge, ...]], ...]  # how a node joins its edges, and these

    @classmethod
    def draw(cls, draws: Draws, num_inputs: int) -> "DrawnCellPlan":
        """Draws two to six nodes of one to four edges."""
        kinds = draws.some(sorted(_OPS_OF), draws.number(3, 6))
        nodes: list[tuple[str, tuple[Edge, ...]]] = []
        for number in range(draws.number(2, 6)):
            known = list(range(num_inputs + number))
            sources = draws.some(known, draws.one_of(1, 2, 2, 3, 3, 4))
            edges = tuple((source, draws.one_of(*kinds), draws.one_of(3, 3, 5, 7)) for source in sources)
            nodes.append((draws.one_of(*_JOINS), edges))
        return cls(num_inputs, tuple(nodes))

    @property
    def loose_ends(self) -> list[int]:
        """The numbers of the nodes that no node reads."""
        read = {source for _, edges in self.nodes for source, _, _ in edges}
        return [number for number in range(self.num_inputs, self.num_inputs + len(self.nodes)) if number not in read]

    @property
    def num_ops(self) -> int:
        """About as many ops as a step of this cell has."""
        edges = [edge for _, node_edges in self.nodes for edge in node_edges]
        return 12 * self.num_inputs + sum(_OPS_OF[kind] + 3 for _, kind, _ in edges) + 4


class DrawnCell(nn.Module):
    """A cell: images, as `inputs` (channels, halvings to be alike) -> [batch, outputs, ...]."""

    def __init__(
        self, plan: DrawnCellPlan, style: ImageStyle, inputs: Sequence[tuple[int, int]], channels: int, stride: int
    ) -> None:
        super().__init__()
        self.plan, self.stride = plan, stride
        self.inputs = nn.ModuleList(Resize(width, channels, halvings, "conv") for width, halvings in inputs)
        self.edges = nn.ModuleList(
            nn.ModuleList(self._operation(style, edge, channels) for edge in edges) for _, edges in plan.nodes
        )
        self.sums = nn.ModuleList(
            WeightedSum(len(edges), "sigmoid") if join == "weighted" else nn.Identity() for join, edges in plan.nodes
        )
        self.outputs = channels * len(plan.loose_ends)

    def _operation(self, style: ImageStyle, edge: Edge, channels: int) -> nn.Module:
        source, kind, size = edge
        stride = self.stride if source < self.plan.num_inputs else 1
        if kind == "identity":
            return nn.Identity() if stride == 1 else nn.AvgPool2d(stride)
        if kind in ("average", "maximum"):
            return (nn.AvgPool2d if kind == "average" else nn.MaxPool2d)(3, stride, 1)
        if kind == "pointwise":
            return ConvUnit(style, channels, channels, "conv", 1, stride)
        return ConvUnit(style, channels, channels, kind, size, stride)

    def forward(self, images: Sequence[Tensor]) -> Tensor:
        known = [resize(image) for resize, image in zip(self.inputs, images, strict=True)]
        for (join, edges), operations, weighted in zip(self.plan.nodes, self.edges, self.sums, strict=True):
            assert isinstance(operations, nn.ModuleList)
            parts = [operation(known[source]) for operation, (source, _, _) in zip(operations, edges, strict=True)]
            known.append(weighted(parts) if join == "weighted" else joined(join, parts))
        ends = [known[number] for number in self.plan.loose_ends]
        return torch.cat(ends, dim=1) if len(ends) > 1 else ends[0]


def joined(kind: str, parts: Sequence[Tensor]) -> Tensor:
    """Returns the sum, mean, maximum or gated product of tensors of one shape."""
    total = parts[0]
    for part in parts[1:]:
        if kind == "maximum":
            total = torch.maximum(total, part)
        else:
            total = total * part.sigmoid() if kind == "product" else total + part
    return total / len(parts) if kind == "mean" and len(parts) > 1 else total


class CellNetwork(nn.Module):
    """Images and labels [batch] -> loss; a second head reads a cell in the middle, if `has_second_head`."""

    def __init__(self, draws: Draws, style: ImageStyle, num_ops: int, num_classes: int) -> None:
        super().__init__()
        num_inputs, num_stages = draws.number(1, 3), draws.number(2, 4)
        reduction = DrawnCellPlan.draw(draws, num_inputs)
        plans = [DrawnCellPlan.draw(draws, num_inputs) for _ in range(num_stages if draws.chance(0.3) else 1)]
        mean_ops = sum(plan.num_ops for plan in plans) / len(plans)
        num_cells = max(round((num_ops - (num_stages - 1) * reduction.num_ops) / mean_ops), num_stages)
        self.stem = ImageStem(draws, style)
        self.cells = nn.ModuleList()
        widths, halvings, channels = [style.channels], [0], style.channels
        for stage in range(num_stages):
            count = num_cells // num_stages + (stage < num_cells % num_stages)
            for position in range(count + (stage > 0)):
                is_reduction = stage > 0 and position == 0
                channels = channels * 2 if is_reduction else channels
                recent = [max(len(widths) - 1 - back, 0) for back in range(num_inputs)]
                plan = reduction if is_reduction else plans[stage % len(plans)]
                inputs = [(widths[number], halvings[-1] - halvings[number]) for number in recent]
                cell = DrawnCell(plan, style, inputs, channels, 2 if is_reduction else 1)
                self.cells.append(cell)
                widths.append(cell.outputs)
                halvings.append(halvings[-1] + is_reduction)
        self.num_inputs = num_inputs
        self.head = ClassLoss(widths[-1], num_classes, bias=True)
        self.middle = len(self.cells) // 2 if draws.chance(0.25) else None
        if self.middle is not None:
            self.second_head = ClassLoss(widths[self.middle + 1], num_classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        known = [self.stem(images)]
        for cell in self.cells:
            known.append(cell([known[max(len(known) - 1 - back, 0)] for back in range(self.num_inputs)]))
        loss = self.head(functional.adaptive_avg_pool2d(known[-1], 1).flatten(1), labels)
        if self.middle is not None:
            loss = loss + 0.4 * self.second_head(known[self.middle + 1].mean((2, 3)), labels)
        return loss


def build(draws: Draws, num_ops: int) -> Example:
    """Draws a network of about `num_ops` ops, with one batch."""
    style = ImageStyle.draw(draws, max_channels=64)
    num_classes = draws.size(10, 1000, 1)
    network = CellNetwork(draws, style, num_ops, num_classes)
    return network, (style.images(), torch.randint(num_classes, (style.batch,))), {}
