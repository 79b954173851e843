"""DenseNet: within a block each layer reads the outputs of all layers before it. Source: Huang et al. 2016
(arXiv 1608.06993), table 1 (DenseNet-BC).
"""

# mypy: disable-error-code=no-any-return

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.models.conv_norm import ConvNorm
from gdp.errors import InputError
from gdp.models.papers.base import Classifier, Example, ModelConfig, random_images

LAYERS: Mapping[int, tuple[int, ...]] = MappingProxyType(
    {21: (2, 2, 2, 2), 41: (2, 4, 8, 5), 121: (6, 12, 24, 16), 169: (6, 12, 32, 32), 201: (6, 12, 48, 32)}
)
"""Layers of the four blocks by depth; 21, for tests, and 41, a third of DenseNet-121, are not in the paper."""

BOTTLENECK = 4  # channels of the 1 x 1 convolution per channel of growth


@dataclass(frozen=True, slots=True)
class DenseNetConfig(ModelConfig):
    """Sizes of the model and of one batch."""

    batch_size: int
    num_layers: int = 121
    image_size: int = 224
    growth: int = 32
    num_classes: int = 1000

    def __post_init__(self) -> None:
        ModelConfig.__post_init__(self)
        if self.num_layers not in LAYERS:
            known = ", ".join(map(str, LAYERS))
            raise InputError(f"DenseNetConfig: num_layers is {self.num_layers}; one of {known} is expected")


class NormConv(nn.Module):
    """Batch normalisation, rectifier, convolution."""

    def __init__(self, inputs: int, outputs: int, kernel: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(inputs)
        self.convolution = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution(functional.relu(self.norm(x)))


class DenseBlock(nn.Module):
    """inputs -> inputs + len(layers) * growth channels."""

    def __init__(self, num_layers: int, inputs: int, growth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                NormConv(inputs + number * growth, BOTTLENECK * growth, 1), NormConv(BOTTLENECK * growth, growth, 3)
            )
            for number in range(num_layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(torch.cat(features, dim=1)))
        return torch.cat(features, dim=1)


class DenseNet(nn.Module):
    """Images [batch, 3, size, size] and labels [batch] -> mean cross-entropy."""

    def __init__(self, config: DenseNetConfig) -> None:
        super().__init__()
        channels = 2 * config.growth
        self.stem = nn.Sequential(ConvNorm(3, channels, 7, stride=2), nn.MaxPool2d(3, 2, 1))
        parts: list[nn.Module] = []
        for num_layers in LAYERS[config.num_layers]:
            if parts:
                parts += [NormConv(channels, channels // 2, 1), nn.AvgPool2d(2)]
                channels //= 2
            parts.append(DenseBlock(num_layers, channels, config.growth))
            channels += num_layers * config.growth
        self.blocks = nn.Sequential(*parts)
        self.norm = nn.BatchNorm2d(channels)
        self.classifier = Classifier(channels, config.num_classes, dropout=0.0)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        features = self.blocks(self.stem(images))
        return self.classifier(functional.relu(self.norm(features)), labels)


def build(config: DenseNetConfig) -> Example:
    """The model with one batch of random images."""
    return DenseNet(config), random_images(config.batch_size, config.image_size, config.num_classes), {}
