"""Randomly wired networks: nodes on a drawn random graph, each a convolution, a recurrence or a small perceptron.

The graphs are those of Xie et al. 2019 (arXiv 1904.01569): Erdos-Renyi, Barabasi-Albert, Watts-Strogatz.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from benchmarks.architectures.families.images import CONV_KINDS, ConvUnit, ImageStem, ImageStyle, Resize
from benchmarks.architectures.families.parts import ClassLoss, Draws, Example, PlainMLP, WeightedSum


def draw_wiring(draws: Draws, num_nodes: int) -> list[list[int]]:
    """Returns the earlier nodes that each node reads; the first reads none."""
    kind = draws.one_of("uniform", "preferential", "ring")
    reads: list[list[int]] = [[]]
    degrees = [1.0]
    chance, count = draws.rng.uniform(1.0, 3.0) / num_nodes, draws.number(1, 3)
    for node in range(1, num_nodes):
        if kind == "uniform":
            sources = [source for source in range(node) if draws.chance(chance)]
        elif kind == "preferential":
            weights = [degree / sum(degrees) for degree in degrees]
            sources = sorted(draws.rng.choice(node, size=min(count, node), replace=False, p=weights).tolist())
        else:
            near = range(max(node - count, 0), node)
            sources = sorted({draws.number(0, node - 1) if draws.chance(0.25) else source for source in near})
        sources = sources or [draws.number(0, node - 1)]
        for source in sources:
            degrees[source] += 1
        degrees.append(1.0 + len(sources))
        reads.append(sources)
    return reads


class WiredStage(nn.Module):
    """Nodes on a random graph: the first reads the stage's input, the output is the mean of the nodes nobody reads."""

    def __init__(self, reads: Sequence[Sequence[int]], nodes: Sequence[nn.Module], join: str) -> None:
        super().__init__()
        self.reads, self.join = reads, join
        self.nodes = nn.ModuleList(nodes)
        has_weights = [join != "sum" and len(sources) > 1 for sources in reads]
        self.sums = nn.ModuleList(
            WeightedSum(len(sources), join) if weighted else nn.Identity()
            for sources, weighted in zip(reads, has_weights, strict=True)
        )
        read = {source for sources in reads for source in sources}
        self.loose_ends = [node for node in range(len(reads)) if node not in read]

    def forward(self, x: Tensor) -> Tensor:
        known: list[Tensor] = []
        for number, (sources, node) in enumerate(zip(self.reads, self.nodes, strict=True)):
            inputs = [known[source] for source in sources] or [x]
            if len(inputs) == 1:
                y = inputs[0]
            else:
                y = torch.stack(inputs).sum(0) if self.join == "sum" else self.sums[number](inputs)
            known.append(node(y))
        ends = [known[number] for number in self.loose_ends]
        return torch.stack(ends).mean(0) if len(ends) > 1 else ends[0]


class WiredImages(nn.Module):
    """Images, labels [batch] -> loss, through stages of convolutions on random graphs."""

    def __init__(self, draws: Draws, style: ImageStyle, num_ops: int, num_classes: int) -> None:
        super().__init__()
        num_stages, join = draws.number(1, 3), draws.one_of("sum", "sigmoid", "softmax", "plain")
        num_nodes = max(num_ops // ((18 if join == "sum" else 30) * num_stages), 3)
        kinds = draws.some(CONV_KINDS, draws.number(1, 2))
        self.stem = ImageStem(draws, style)
        self.resizes, self.stages = nn.ModuleList(), nn.ModuleList()
        width = style.channels
        for _ in range(num_stages):
            self.resizes.append(Resize(width, 2 * width, 1, "conv"))
            width *= 2
            nodes = [ConvUnit(style, width, width, draws.one_of(*kinds)) for _ in range(num_nodes)]
            self.stages.append(WiredStage(draw_wiring(draws, num_nodes), nodes, join))
        self.head = ClassLoss(width, num_classes, bias=True)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(images)
        for resize, stage in zip(self.resizes, self.stages, strict=True):
            x = stage(resize(x))
        return self.head(x.mean((2, 3)), labels)


class WiredVectors(nn.Module):
    """Vectors [batch, features], labels [batch] -> loss, through perceptrons on one random graph."""

    def __init__(self, draws: Draws, num_features: int, num_ops: int, num_classes: int) -> None:
        super().__init__()
        width, inner = draws.size(256, 2048, 64), draws.size(256, 4096, 64)
        join, act = draws.one_of("sum", "sigmoid", "plain"), draws.one_of("relu", "gelu", "tanh", "silu")
        norm, depth = draws.one_of("none", "layer", "rms"), draws.number(1, 3)
        num_nodes = max(num_ops // (10 * depth + 6 + (14 if join != "sum" else 0)), 3)
        self.first = nn.Linear(num_features, width)
        widths = [width, *([inner] * (depth - 1)), width]
        nodes = [PlainMLP(widths, act, norm=norm, residual=depth > 1) for _ in range(num_nodes)]
        self.stage = WiredStage(draw_wiring(draws, num_nodes), nodes, join)
        self.head = ClassLoss(width, num_classes)

    def forward(self, vectors: Tensor, labels: Tensor) -> Tensor:
        return self.head(self.stage(self.first(vectors).tanh()), labels)


def build(draws: Draws, num_ops: int) -> Example:
    """Draws a randomly wired network of about `num_ops` ops, with one batch."""
    num_classes = draws.size(10, 1000, 1)
    if draws.chance(0.65):
        style = ImageStyle.draw(draws, max_channels=64)
        return (
            WiredImages(draws, style, num_ops, num_classes),
            (style.images(), torch.randint(num_classes, (style.batch,))),
            {},
        )
    num_features, batch = draws.size(64, 1024), draws.size(1024, 16384)
    model = WiredVectors(draws, num_features, num_ops, num_classes)
    return model, (torch.randn(batch, num_features), torch.randint(num_classes, (batch,))), {}
