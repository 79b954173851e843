"""EfficientNet: inverted residual blocks with squeeze and excitation. Sources: Tan and Le 2019 (arXiv 1905.11946),
table 1; blocks: Sandler et al. 2018 (arXiv 1801.04381), Hu et al. 2017 (arXiv 1709.01507).
"""

# mypy: disable-error-code=no-any-return

import math
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

from benchmarks.models.conv_norm import ConvNorm
from gdp.models.papers.base import Classifier, Example, ModelConfig, random_images

# (expansion, kernel, stride, channels, blocks) of each stage of EfficientNet-B0
STAGES = (
    (1, 3, 1, 16, 1),
    (6, 3, 2, 24, 2),
    (6, 5, 2, 40, 2),
    (6, 3, 2, 80, 3),
    (6, 5, 1, 112, 3),
    (6, 5, 2, 192, 4),
    (6, 3, 1, 320, 1),
)
STEM, HEAD, CHANNEL_STEP = 32, 1280, 8


@dataclass(frozen=True, slots=True)
class EfficientNetConfig(ModelConfig):
    """Sizes of one batch and of the model: B0 scaled to `width_percent` channels and `depth_percent` blocks.

    B0 is 100, 100 at 224 pixels, B4 140, 180 at 380 (section 5 and the authors' release). A block is skipped with a
    chance that grows to `skip` at the last.
    """

    batch_size: int
    width_percent: int = 140
    depth_percent: int = 180
    image_size: int = 380
    num_classes: int = 1000
    skip: float = 0.2
    dropout: float = 0.4

    def scaled(self, channels: int) -> int:
        """Returns this model's channels for B0's `channels`: a multiple of 8, at least 90 % of the exact number."""
        exact = channels * self.width_percent / 100
        rounded = max(CHANNEL_STEP, int(exact + CHANNEL_STEP / 2) // CHANNEL_STEP * CHANNEL_STEP)
        return rounded + CHANNEL_STEP if rounded < 0.9 * exact else rounded


class SqueezeExcite(nn.Module):
    """Scales each channel by what two 1 x 1 convolutions make of the means of all channels."""

    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(channels, inner, 1)
        self.expand = nn.Conv2d(inner, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.expand(functional.silu(self.reduce(x.mean(dim=(2, 3), keepdim=True)))).sigmoid()


class InvertedResidual(nn.Module):
    """Expand, depthwise convolution, squeeze and excitation, project; a shortcut where the shape allows."""

    def __init__(self, inputs: int, outputs: int, expansion: int, kernel: int, stride: int, skip: float) -> None:
        super().__init__()
        inner = inputs * expansion
        self.expand = nn.Identity() if expansion == 1 else ConvNorm(inputs, inner, 1, activation=functional.silu)
        self.depthwise = ConvNorm(inner, inner, kernel, stride, groups=inner, activation=functional.silu)
        self.excite = SqueezeExcite(inner, max(1, inputs // 4))
        self.project = ConvNorm(inner, outputs, 1, activation=None)
        self.is_residual = stride == 1 and inputs == outputs
        self.keep = nn.Dropout(skip)  # of whole images: Huang et al. 2016, arXiv 1603.09382

    def forward(self, x: Tensor) -> Tensor:
        y = self.project(self.excite(self.depthwise(self.expand(x))))
        return x + y * self.keep(y.new_ones(len(y), 1, 1, 1)) if self.is_residual else y


class EfficientNet(nn.Module):
    """Images [batch, 3, size, size] and labels [batch] -> mean cross-entropy."""

    def __init__(self, config: EfficientNetConfig) -> None:
        super().__init__()
        counts = [math.ceil(stage[-1] * config.depth_percent / 100) for stage in STAGES]
        inputs = config.scaled(STEM)
        self.stem = ConvNorm(3, inputs, 3, stride=2, activation=functional.silu)
        self.blocks = nn.Sequential()
        for (expansion, kernel, stride, channels, _), count in zip(STAGES, counts, strict=True):
            outputs = config.scaled(channels)
            for number in range(count):
                skip = config.skip * len(self.blocks) / sum(counts)
                step = stride if number == 0 else 1
                self.blocks.append(InvertedResidual(inputs, outputs, expansion, kernel, step, skip))
                inputs = outputs
        head = config.scaled(HEAD)
        self.head = ConvNorm(inputs, head, 1, activation=functional.silu)
        self.classifier = Classifier(head, config.num_classes, config.dropout)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return self.classifier(self.head(self.blocks(self.stem(images))), labels)


def build(config: EfficientNetConfig) -> Example:
    """The model with one batch of random images."""
    return EfficientNet(config), random_images(config.batch_size, config.image_size, config.num_classes), {}
