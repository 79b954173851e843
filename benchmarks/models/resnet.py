"""ResNet with bottlenecks. Source: He et al. 2015 (arXiv 1512.03385), table 1.

The stride of a block is that of its 3 x 3 convolution, as in the common implementations ("v1.5").
"""

# mypy: disable-error-code=no-any-return

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor, nn
from torch.nn import functional

from benchmarks.models.conv_norm import ConvNorm
from gdp.errors import InputError
from gdp.models.papers.base import Classifier, Example, ModelConfig, random_images

BLOCKS: Mapping[int, tuple[int, ...]] = MappingProxyType(
    {26: (2, 2, 2, 2), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
)
"""Blocks of the four stages by number of layers; 26 is not in the paper, but ResNet-18 with bottlenecks."""

EXPANSION = 4


@dataclass(frozen=True, slots=True)
class ResNetConfig(ModelConfig):
    """Sizes of the model and of one batch; `width` is the paper's 64."""

    batch_size: int
    num_layers: int = 50
    image_size: int = 224
    width: int = 64
    num_classes: int = 1000

    def __post_init__(self) -> None:
        ModelConfig.__post_init__(self)
        check_layers(type(self).__name__, self.num_layers)


def check_layers(name: str, num_layers: int) -> None:
    """Raises InputError unless there is a ResNet of `num_layers` layers."""
    if num_layers not in BLOCKS:
        known = ", ".join(map(str, BLOCKS))
        raise InputError(f"{name}: num_layers is {num_layers}; one of {known} is expected")


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions beside a shortcut: inputs -> EXPANSION * inner channels."""

    def __init__(self, inputs: int, inner: int, stride: int) -> None:
        super().__init__()
        outputs = EXPANSION * inner
        self.reduce = ConvNorm(inputs, inner, 1)
        self.middle = ConvNorm(inner, inner, 3, stride)
        self.expand = ConvNorm(inner, outputs, 1, activation=None)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else ConvNorm(inputs, outputs, 1, stride, activation=None)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.expand(self.middle(self.reduce(x))) + self.shortcut(x))


class Backbone(nn.Module):
    """Images -> the features of the four stages, at 1/4, 1/8, 1/16 and 1/32 of the size."""

    def __init__(self, num_layers: int, width: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(ConvNorm(3, width, 7, stride=2), nn.MaxPool2d(3, 2, 1))
        self.stages = nn.ModuleList()
        inputs = width
        for number, num_blocks in enumerate(BLOCKS[num_layers]):
            inner, stride = width << number, 1 if number == 0 else 2
            blocks = [Bottleneck(inputs, inner, stride)]
            inputs = EXPANSION * inner
            blocks += [Bottleneck(inputs, inner, 1) for _ in range(1, num_blocks)]
            self.stages.append(nn.Sequential(*blocks))
        self.num_channels = [EXPANSION * width << number for number in range(len(self.stages))]

    def forward(self, images: Tensor) -> list[Tensor]:
        x, features = self.stem(images), []
        for stage in self.stages:
            x = stage(x)
            features.append(x)
        return features


class ResNet(nn.Module):
    """Images [batch, 3, size, size] and labels [batch] -> mean cross-entropy."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.backbone = Backbone(config.num_layers, config.width)
        self.classifier = Classifier(self.backbone.num_channels[-1], config.num_classes, dropout=0.0)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return self.classifier(self.backbone(images)[-1], labels)


def build(config: ResNetConfig) -> Example:
    """The model with one batch of random images."""
    return ResNet(config), random_images(config.batch_size, config.image_size, config.num_classes), {}
