"""U-shapes: down through resolutions and up again, with drawn blocks, skips, and nodes between down and up."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.architectures.families.images import RESIZE_KINDS, ImageStyle, Resize
from benchmarks.architectures.families.parts import Draws, Example
from benchmarks.architectures.families.residual import BlockPlan, DrawnBlock


class SkipJoin(nn.Module):
    """Joins images from the way down and from below: concatenated, added, or gated by the lower one."""

    def __init__(self, kind: str, count: int, width: int) -> None:
        super().__init__()
        self.kind = kind
        self.merge = nn.Conv2d(width * count if kind == "cat" else width, width, 1) if kind != "add" else nn.Identity()

    def forward(self, parts: list[Tensor]) -> Tensor:
        if self.kind == "cat":
            return self.merge(torch.cat(parts, dim=1))
        *skips, lower = parts
        gate = self.merge(lower).sigmoid() if self.kind == "gate" else None
        for skip in skips:
            lower = lower + (skip if gate is None else skip * gate)
        return lower


class UShape(nn.Module):
    """Images, a class for each pixel or an image to predict -> loss.

    Level l has nodes l.0 (down), l.1, ... (up). In a full grid node l.j reads all nodes of its level before it and the
    last one below it (Zhou et al. 2018, arXiv 1807.10165); else there is a single node on the way up.
    """

    def __init__(self, draws: Draws, style: ImageStyle, num_ops: int, num_outputs: int, *, is_image: bool) -> None:
        super().__init__()
        self.num_levels, self.is_grid = draws.number(2, 4 if style.size < 96 else 5), draws.chance(0.3)
        down, up = BlockPlan.draw(draws), BlockPlan.draw(draws)
        skip, growth = draws.one_of("cat", "add", "gate"), draws.one_of(1.0, 1.5, 2.0)
        widths = [max(round(style.channels * growth**level / 8), 1) * 8 for level in range(self.num_levels)]
        heights = [self.num_levels - level if self.is_grid else 2 for level in range(self.num_levels)]
        heights[-1] = 1
        num_nodes = sum(heights)
        repeats = max(round(num_ops / (num_nodes * ((down.num_ops + up.num_ops) / 2 + 16))), 1)
        self.first = nn.Conv2d(3, widths[0], 3, padding=1)
        self.downs, self.ups = nn.ModuleList(), nn.ModuleDict()
        self.blocks, self.joins = nn.ModuleDict(), nn.ModuleDict()
        kind = draws.one_of(*RESIZE_KINDS)
        for level, width in enumerate(widths):
            self.downs.append(Resize(widths[max(level - 1, 0)], width, int(level > 0), kind))
            for node in range(heights[level]):
                plan, key = (up if node else down), f"{level}_{node}"
                self.blocks[key] = nn.Sequential(*(DrawnBlock(plan, style, width, width) for _ in range(repeats)))
                if node:
                    self.joins[key] = SkipJoin(skip, node + 1 if self.is_grid else 2, width)
                    self.ups[key] = Resize(widths[level + 1], width, -1, "conv")
        self.heights, self.is_image = heights, is_image
        self.num_heads = draws.number(1, heights[0] - 1) if self.is_grid else 1
        self.heads = nn.ModuleList(nn.Conv2d(widths[0], num_outputs, 1) for _ in range(self.num_heads))

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        rows: list[list[Tensor]] = []
        x = self.first(images)
        for level, down in enumerate(self.downs):
            x = self.blocks[f"{level}_0"](down(x))
            rows.append([x])
        for node in range(1, max(self.heights)):
            for level in reversed(range(self.num_levels - 1)):
                if node < self.heights[level]:
                    self._add(rows, level, node)
        measure = functional.mse_loss if self.is_image else functional.cross_entropy
        losses = [measure(head(x), targets) for head, x in zip(self.heads, rows[0][::-1], strict=False)]
        return sum(losses[1:], losses[0])

    def _add(self, rows: list[list[Tensor]], level: int, node: int) -> None:
        """Appends a node to its level."""
        key, below = f"{level}_{node}", rows[level + 1]
        lower = self.ups[key](below[min(node - 1, len(below) - 1)] if self.is_grid else below[-1])
        rows[level].append(self.blocks[key](self.joins[key]([*rows[level][:node], lower])))


def build(draws: Draws, num_ops: int) -> Example:
    """Draws a U-shape of about `num_ops` ops, with one batch."""
    style = ImageStyle.draw(draws, max_size=160)
    is_image, num_classes = draws.chance(0.4), draws.size(4, 40, 1)
    model = UShape(draws, style, num_ops, 3 if is_image else num_classes, is_image=is_image)
    shape = style.batch, style.size, style.size
    targets = style.images() if is_image else torch.randint(num_classes, shape)
    return model, (style.images(), targets), {}
