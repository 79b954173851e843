"""The U-Net of a diffusion model, which predicts the noise of an image. Source: Ho et al. 2020 (arXiv 2006.11239),
appendix B; U-Nets: Ronneberger et al. 2015 (arXiv 1505.04597).

Down through `num_levels` resolutions and up again: every residual block on the way down is read, much later, by one on
the way up. An embedding of the noise level goes to all blocks; self-attention at the resolution `attention_size`.
"""

# mypy: disable-error-code=no-any-return

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import functional

from gdp.errors import InputError
from gdp.models.papers.base import Example, ModelConfig

NUM_NOISE_LEVELS = 1000  # section 4

MULTIPLIERS: Mapping[int, tuple[int, ...]] = MappingProxyType({3: (1, 2, 2), 4: (1, 2, 2, 2), 6: (1, 1, 2, 2, 4, 4)})
"""Widths of the resolutions by their number: 6 at 256 x 256 pixels, 4 at 32 x 32; 3 is not in the paper."""


@dataclass(frozen=True, slots=True)
class UNetConfig(ModelConfig):
    """Sizes of the model and of one batch; level l has `channels` times the l-th of `MULTIPLIERS[num_levels]`."""

    batch_size: int
    image_size: int = 256
    num_levels: int = 6
    blocks_per_level: int = 2
    channels: int = 128
    attention_size: int = 16
    num_groups: int = 32
    dropout: float = 0.0

    def __post_init__(self) -> None:
        ModelConfig.__post_init__(self)
        if self.num_levels not in MULTIPLIERS:
            known = ", ".join(map(str, MULTIPLIERS))
            raise InputError(f"UNetConfig: num_levels is {self.num_levels}; one of {known} is expected")
        if self.channels % self.num_groups:
            raise InputError(
                f"UNetConfig: channels is {self.channels}; a multiple of num_groups ({self.num_groups}) is expected"
            )
        if self.image_size % 2 ** (self.num_levels - 1):
            raise InputError(
                f"UNetConfig: image_size is {self.image_size}; one that can be halved so often is expected"
            )


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions, the embedding of the noise level [batch, width] added between them."""

    def __init__(self, config: UNetConfig, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first_norm = nn.GroupNorm(config.num_groups, inputs)
        self.first = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.level = nn.Linear(4 * config.channels, outputs)
        self.second_norm = nn.GroupNorm(config.num_groups, outputs)
        self.dropout = nn.Dropout(config.dropout)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shortcut = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        inner = self.first(functional.silu(self.first_norm(x))) + self.level(functional.silu(level))[:, :, None, None]
        inner = self.second(self.dropout(functional.silu(self.second_norm(inner))))
        return self.shortcut(x) + inner


class PixelAttention(nn.Module):
    """Single-head attention between all pixels, with a residual connection: [batch, channels, height, width]."""

    def __init__(self, channels: int, num_groups: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(num_groups, channels)
        self.query_key_value = nn.Conv2d(channels, 3 * channels, 1)
        self.output = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.query_key_value(self.norm(x)).flatten(2).chunk(3, dim=1)
        weights = (query.transpose(1, 2) @ key * x.shape[1] ** -0.5).softmax(dim=-1)
        return x + self.output((value @ weights.transpose(1, 2)).view(x.shape))


class Block(nn.Module):
    """A residual block, then attention at the one resolution that has it."""

    def __init__(self, config: UNetConfig, inputs: int, outputs: int, size: int) -> None:
        super().__init__()
        self.residual = ResidualBlock(config, inputs, outputs)
        attends = size == config.attention_size
        self.attention = PixelAttention(outputs, config.num_groups) if attends else nn.Identity()

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        return self.attention(self.residual(x, level))


class NoiseLevel(nn.Module):
    """Levels [batch] -> their sinusoids through two linear layers, [batch, 4 * channels]."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels
        self.first = nn.Linear(channels, 4 * channels)
        self.second = nn.Linear(4 * channels, 4 * channels)

    def forward(self, levels: Tensor) -> Tensor:
        half = self.channels // 2
        rates = 10000.0 ** -(torch.arange(half, dtype=torch.float32, device=levels.device) / (half - 1))
        angles = torch.outer(levels.float(), rates)
        return self.second(functional.silu(self.first(torch.cat((angles.sin(), angles.cos()), dim=1))))


class Down(nn.Module):
    """One resolution on the way down: half the size of the one before it, unless it is the first, then blocks."""

    def __init__(self, config: UNetConfig, inputs: int, width: int, size: int) -> None:
        super().__init__()
        is_first = size == config.image_size
        self.shrink = None if is_first else nn.Conv2d(inputs, inputs, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(
            Block(config, width if number else inputs, width, size) for number in range(config.blocks_per_level)
        )
        self.widths = [*([] if is_first else [inputs]), *([width] * config.blocks_per_level)]

    def forward(self, x: Tensor, level: Tensor) -> list[Tensor]:
        """Returns all features for the way up, of `widths` channels; the last goes on down."""
        kept = []
        if self.shrink is not None:
            x = self.shrink(x)
            kept.append(x)
        for block in self.blocks:
            x = block(x, level)
            kept.append(x)
        return kept


class Up(nn.Module):
    """One resolution on the way up: twice the size of the one before it; each block reads the last of `kept`, once."""

    def __init__(self, config: UNetConfig, inputs: int, kept: list[int], width: int, size: int) -> None:
        super().__init__()
        is_first = size == config.image_size >> config.num_levels - 1
        self.grow = None if is_first else nn.Conv2d(inputs, inputs, 3, padding=1)
        self.blocks = nn.ModuleList(
            Block(config, (width if number else inputs) + kept.pop(), width, size)
            for number in range(config.blocks_per_level + 1)
        )

    def forward(self, x: Tensor, kept: list[Tensor], level: Tensor) -> Tensor:
        if self.grow is not None:
            x = self.grow(functional.interpolate(x, scale_factor=2.0, mode="nearest"))
        for block in self.blocks:
            x = block(torch.cat((x, kept.pop()), dim=1), level)
        return x


class Middle(nn.Module):
    """Attention between two residual blocks, at the lowest resolution."""

    def __init__(self, config: UNetConfig, width: int) -> None:
        super().__init__()
        self.before, self.after = ResidualBlock(config, width, width), ResidualBlock(config, width, width)
        self.attention = PixelAttention(width, config.num_groups)

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        return self.after(self.attention(self.before(x, level)), level)


class UNet(nn.Module):
    """Images with noise [batch, 3, size, size], noise levels [batch], the noise -> mean squared error."""

    def __init__(self, config: UNetConfig) -> None:
        super().__init__()
        widths = [config.channels * factor for factor in MULTIPLIERS[config.num_levels]]
        sizes = [config.image_size >> number for number in range(config.num_levels)]
        self.level = NoiseLevel(config.channels)
        self.stem = nn.Conv2d(3, config.channels, 3, padding=1)
        kept = [config.channels]
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        for width, size in zip(widths, sizes, strict=True):
            down = Down(config, kept[-1], width, size)
            self.down.append(down)
            kept += down.widths
        self.middle = Middle(config, widths[-1])
        inputs = widths[-1]
        for width, size in zip(widths[::-1], sizes[::-1], strict=True):
            self.up.append(Up(config, inputs, kept, width, size))
            inputs = width
        self.norm = nn.GroupNorm(config.num_groups, inputs)
        self.output = nn.Conv2d(inputs, 3, 3, padding=1)

    def forward(self, images: Tensor, levels: Tensor, noise: Tensor) -> Tensor:
        level = self.level(levels)
        kept = [self.stem(images)]
        for down in self.down:
            kept += down(kept[-1], level)
        x = self.middle(kept[-1], level)
        for up in self.up:
            x = up(x, kept, level)
        return functional.mse_loss(self.output(functional.silu(self.norm(x))), noise)


def build(config: UNetConfig) -> Example:
    """The model with one batch of random images."""
    shape = config.batch_size, 3, config.image_size, config.image_size
    levels = torch.randint(NUM_NOISE_LEVELS, (config.batch_size,))
    return UNet(config), (torch.randn(shape), levels, torch.randn(shape)), {}
