"""HRNet for keypoints: branches of several resolutions side by side, which exchange features again and again.
Source: Sun et al. 2019 (arXiv 1902.09212), section 3; sizes of stages from the authors' release.
"""

# mypy: disable-error-code=no-any-return

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.models.conv_norm import ConvNorm
from benchmarks.models.resnet import EXPANSION, Bottleneck
from gdp.errors import InputError
from gdp.models.papers.base import Example, ModelConfig

MODULES: Mapping[int, tuple[int, ...]] = MappingProxyType({2: (1,), 3: (1, 4), 4: (1, 4, 3)})
"""Modules of the stages with 2, 3, ... branches, by the greatest number of branches; the published models have 4."""

STEM, FIRST_BLOCKS, BLOCKS_PER_MODULE = 64, 4, 4


@dataclass(frozen=True, slots=True)
class HRNetConfig(ModelConfig):
    """Sizes of one batch and of the model, whose branches have `width` channels, twice, four times as many, ..."""

    batch_size: int
    width: int = 32
    num_branches: int = 4
    image_height: int = 256
    image_width: int = 192
    num_keypoints: int = 17

    def __post_init__(self) -> None:
        ModelConfig.__post_init__(self)
        if self.num_branches not in MODULES:
            known = ", ".join(map(str, MODULES))
            raise InputError(f"HRNetConfig: num_branches is {self.num_branches}; one of {known} is expected")
        for size in (self.image_height, self.image_width):
            if size % 2 ** (self.num_branches + 1):
                raise InputError(
                    f"HRNetConfig: an image side is {size}; a multiple of {2 ** (self.num_branches + 1)} is expected"
                )


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions with a residual connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = ConvNorm(channels, channels, 3)
        self.second = ConvNorm(channels, channels, 3, activation=None)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.second(self.first(x)) + x)


class Parallel(nn.Module):
    """Modules side by side, each with an input of its own."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)

    def forward(self, inputs: list[Tensor]) -> list[Tensor]:
        return [part(x) for part, x in zip(self.parts, inputs, strict=True)]


class Exchange(nn.Module):
    """Every output branch is the sum of all inputs, brought to its resolution (figure 3)."""

    def __init__(self, widths: list[int], num_outputs: int) -> None:
        super().__init__()
        self.outputs = nn.ModuleList(
            Parallel(self.path(widths, source, target) for source in range(len(widths)))
            for target in range(num_outputs)
        )

    @staticmethod
    def path(widths: list[int], source: int, target: int) -> nn.Module:
        """Returns the module from the resolution of branch `source` to that of `target`."""
        if source == target:
            return nn.Identity()
        if source > target:
            narrow = ConvNorm(widths[source], widths[target], 1, activation=None)
            return nn.Sequential(narrow, nn.Upsample(scale_factor=float(2 ** (source - target))))
        width = widths[source]
        steps = [ConvNorm(width, width, 3, stride=2) for _ in range(source, target - 1)]
        return nn.Sequential(*steps, ConvNorm(width, widths[target], 3, stride=2, activation=None))

    def forward(self, branches: list[Tensor]) -> list[Tensor]:
        return [functional.relu(reduce(torch.add, paths(branches))) for paths in self.outputs]


class Stage(nn.Module):
    """One more branch, made of the lowest resolution, then modules of blocks and exchanges.

    The last module of the last stage gives the highest resolution only.
    """

    def __init__(self, inputs: int, widths: list[int], num_modules: int, *, last: bool) -> None:
        super().__init__()
        self.fork = ConvNorm(inputs, widths[-1], 3, stride=2)
        self.exchanges = nn.Sequential()
        for number in range(num_modules):
            num_outputs = 1 if last and number == num_modules - 1 else len(widths)
            branches = (nn.Sequential(*(BasicBlock(width) for _ in range(BLOCKS_PER_MODULE))) for width in widths)
            self.exchanges.append(nn.Sequential(Parallel(branches), Exchange(widths, num_outputs)))

    def forward(self, features: list[Tensor], lowest: Tensor) -> list[Tensor]:
        return self.exchanges([*features, self.fork(lowest)])


class HRNet(nn.Module):
    """Images [batch, 3, height, width], heat maps [batch, keypoints, height / 4, width / 4] -> mean squared error."""

    def __init__(self, config: HRNetConfig) -> None:
        super().__init__()
        self.stem = nn.Sequential(ConvNorm(3, STEM, 3, stride=2), ConvNorm(STEM, STEM, 3, stride=2))
        channels = EXPANSION * STEM
        blocks = [Bottleneck(STEM, STEM, 1), *(Bottleneck(channels, STEM, 1) for _ in range(1, FIRST_BLOCKS))]
        self.first = nn.Sequential(*blocks)
        self.highest = ConvNorm(channels, config.width, 3)
        widths = [config.width << number for number in range(config.num_branches)]
        self.stages = nn.ModuleList()
        for number, num_modules in enumerate(MODULES[config.num_branches]):
            inputs = channels if number == 0 else widths[number]
            last = number == config.num_branches - 2
            self.stages.append(Stage(inputs, widths[: number + 2], num_modules, last=last))
        self.heat_maps = nn.Conv2d(config.width, config.num_keypoints, 1)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        lowest = self.first(self.stem(images))
        features = [self.highest(lowest)]
        for stage in self.stages:
            features = stage(features, lowest)
            lowest = features[-1]
        return functional.mse_loss(self.heat_maps(features[0]), targets)


def build(config: HRNetConfig) -> Example:
    """The model with one batch of random images and heat maps."""
    images = torch.randn(config.batch_size, 3, config.image_height, config.image_width)
    targets = torch.rand(config.batch_size, config.num_keypoints, config.image_height // 4, config.image_width // 4)
    return HRNet(config), (images, targets), {}
