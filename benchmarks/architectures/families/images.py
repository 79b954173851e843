"""Parts of networks for images [batch, channels, height, width]."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.architectures.families.parts import Draws, activation


@dataclass(frozen=True, slots=True)
class ImageStyle:
    """The choices that the convolutions of a network share."""

    norm: str
    act: str
    is_norm_first: bool
    batch: int
    size: int  # height and width
    channels: int  # of the first stage

    @classmethod
    def draw(cls, draws: Draws, *, max_size: int = 224, max_channels: int = 128) -> "ImageStyle":
        """Draws a style, with larger batches for smaller images."""
        size = draws.one_of(*(size for size in (32, 64, 96, 128, 160, 224) if size <= max_size))
        return cls(
            draws.one_of("batch", "batch", "group", "layer", "none"),
            draws.one_of("relu", "gelu", "silu", "elu", "leaky"),
            draws.chance(0.4),
            draws.size(2048 // size, 32768 // size),
            size,
            draws.size(32, max_channels, 16),
        )

    def images(self) -> Tensor:
        """Returns a batch of random images."""
        return torch.randn(self.batch, 3, self.size, self.size)


class ChannelNorm(nn.Module):
    """Layer normalisation over the channels of each pixel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def image_norm(kind: str, channels: int) -> nn.Module:
    """Returns the normalisation called `kind`."""
    if kind == "none":
        return nn.Identity()
    if kind == "group":
        return nn.GroupNorm(8 if channels % 8 == 0 else 1, channels)
    return nn.BatchNorm2d(channels) if kind == "batch" else ChannelNorm(channels)


class ConvUnit(nn.Module):
    """A convolution with normalisation and activation, before or after it as the style says.

    `kind`: conv, separable, depthwise, grouped, dilated, factored (a row, then a column).
    """

    def __init__(self, style: ImageStyle, inputs: int, outputs: int, kind: str, size: int = 3, stride: int = 1) -> None:
        super().__init__()
        self.is_norm_first = style.is_norm_first
        self.norm = image_norm(style.norm, inputs if style.is_norm_first else outputs)
        self.act = activation(style.act)
        bias, around = style.norm == "none", size // 2
        if kind == "separable":
            depthwise = nn.Conv2d(inputs, inputs, size, stride, around, groups=inputs, bias=False)
            self.conv: nn.Module = nn.Sequential(depthwise, nn.Conv2d(inputs, outputs, 1, bias=bias))
        elif kind == "factored":
            row = nn.Conv2d(inputs, outputs, (1, size), (1, stride), (0, around), bias=False)
            column = nn.Conv2d(outputs, outputs, (size, 1), (stride, 1), (around, 0), bias=bias)
            self.conv = nn.Sequential(row, column)
        else:
            dilation = 2 if kind == "dilated" else 1
            groups = {"depthwise": inputs if inputs == outputs else 1, "grouped": 4 if inputs % 4 == 0 else 1}
            count = groups.get(kind, 1) if outputs % groups.get(kind, 1) == 0 else 1
            self.conv = nn.Conv2d(inputs, outputs, size, stride, around * dilation, dilation, groups=count, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.act(self.norm(x))) if self.is_norm_first else self.act(self.norm(self.conv(x)))


CONV_KINDS = ("conv", "separable", "depthwise", "grouped", "dilated", "factored")


class ChannelGate(nn.Module):
    """Scales channels by a small network of their means, or pixels by a convolution."""

    def __init__(self, channels: int, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind == "channels":
            inner = max(channels // 8, 4)
            self.squeeze, self.excite = nn.Linear(channels, inner), nn.Linear(inner, channels)
        elif kind == "pixels":
            self.score = nn.Conv2d(channels, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "channels":
            scales = self.excite(self.squeeze(x.mean((2, 3))).relu()).sigmoid()
            return x * scales[:, :, None, None]
        return x * self.score(x).sigmoid() if self.kind == "pixels" else x


class Resize(nn.Module):
    """Halves an image `halvings` times and gives it `outputs` channels; for less than 0 it doubles it."""

    def __init__(self, inputs: int, outputs: int, halvings: int, kind: str) -> None:
        super().__init__()
        self.halvings, self.kind = halvings, kind
        stride = 2**halvings if halvings > 0 and kind == "conv" else 1
        needs_conv = inputs != outputs or stride > 1
        self.conv = nn.Conv2d(inputs, outputs, stride, stride) if needs_conv else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        if self.halvings > 0 and self.kind != "conv":
            pool = functional.max_pool2d if self.kind == "maximum" else functional.avg_pool2d
            x = pool(x, 2**self.halvings)
        x = self.conv(x)
        if self.halvings < 0:
            x = functional.interpolate(x, scale_factor=float(2**-self.halvings), mode="nearest")
        return x


RESIZE_KINDS = ("conv", "maximum", "average")


class ImageStem(nn.Module):
    """The first convolutions: 3 channels to the style's, halved `halvings` times."""

    def __init__(self, draws: Draws, style: ImageStyle) -> None:
        super().__init__()
        self.halvings = draws.number(1, 2) if style.size > 64 else draws.number(0, 1)
        first = draws.one_of(3, 5, 7)
        strides = [2] * self.halvings + [1] * draws.number(0 if self.halvings else 1, 1)
        widths, sizes = [3, *(style.channels for _ in strides)], [first, *(3 for _ in strides[1:])]
        layers = zip(pairwise(widths), sizes, strides, strict=True)
        self.convs = nn.ModuleList(nn.Conv2d(*pair, size, stride, size // 2) for pair, size, stride in layers)
        self.act = activation(style.act)

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = self.act(conv(x))
        return x
