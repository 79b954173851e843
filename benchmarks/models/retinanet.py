"""RetinaNet: a ResNet, a feature pyramid, and two heads that all levels of the pyramid share. Sources: Lin et al. 2017,
"Focal Loss for Dense Object Detection" (arXiv 1708.02002), section 4; pyramid: Lin et al. 2016 (arXiv 1612.03144).

Anchors are matched to objects beforehand: their classes and boxes are inputs.
"""

# mypy: disable-error-code=no-any-return

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.models.resnet import Backbone, check_layers
from gdp.errors import InputError
from gdp.models.papers.base import Example, ModelConfig

NUM_ANCHORS = 9  # at each place of a level: three sizes of three shapes
HEAD_LAYERS = 4
FOCUS, POSITIVE_WEIGHT = 2.0, 0.25  # gamma and alpha, section 3.2
PRIOR = 0.01  # chance of an object that the last bias of the classes starts with, section 3.3
STRIDES = (8, 16, 32, 64, 128)  # of the levels P3 to P7


@dataclass(frozen=True, slots=True)
class RetinaNetConfig(ModelConfig):
    """Sizes of the model and of one batch."""

    batch_size: int
    num_layers: int = 50
    image_size: int = 512
    width: int = 64
    channels: int = 256
    num_classes: int = 80

    def __post_init__(self) -> None:
        ModelConfig.__post_init__(self)
        check_layers(type(self).__name__, self.num_layers)
        if self.image_size % STRIDES[-1]:
            raise InputError(f"RetinaNetConfig: image_size is {self.image_size}; a multiple of 128 is expected")


class Pyramid(nn.Module):
    """Features of the backbone's last three stages -> P3 to P7, each of `channels`."""

    def __init__(self, inputs: list[int], channels: int) -> None:
        super().__init__()
        self.lateral = nn.ModuleList(nn.Conv2d(width, channels, 1) for width in inputs)
        self.smooth = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in inputs)
        self.sixth = nn.Conv2d(inputs[-1], channels, 3, stride=2, padding=1)
        self.seventh = nn.Conv2d(channels, channels, 3, stride=2, padding=1)

    def forward(self, features: list[Tensor]) -> list[Tensor]:
        merged = [self.lateral[-1](features[-1])]
        for lateral, x in zip(self.lateral[-2::-1], features[-2::-1], strict=True):
            merged.insert(0, lateral(x) + functional.interpolate(merged[0], scale_factor=2.0, mode="nearest"))
        levels = [smooth(x) for smooth, x in zip(self.smooth, merged, strict=True)]
        levels.append(self.sixth(features[-1]))
        levels.append(self.seventh(levels[-1].relu()))
        return levels


class PyramidHead(nn.Module):
    """Convolutions on one level [batch, channels, height, width] -> [batch, height * width * NUM_ANCHORS, outputs]."""

    def __init__(self, channels: int, outputs: int, bias: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(HEAD_LAYERS))
        self.output = nn.Conv2d(channels, NUM_ANCHORS * outputs, 3, padding=1)
        self.output.bias = nn.Parameter(torch.full((NUM_ANCHORS * outputs,), bias))
        self.num_outputs = outputs

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return self.output(x).permute(0, 2, 3, 1).reshape(len(x), -1, self.num_outputs)


def focal_loss(scores: Tensor, targets: Tensor) -> Tensor:
    """Sum of the focal losses of scores [..., classes] against classes [...]; a class of -1 is background."""
    truth = (targets.unsqueeze(-1) == torch.arange(scores.shape[-1], device=scores.device)).to(scores.dtype)
    losses = functional.softplus(scores) - truth * scores  # cross-entropy of the logistic function
    doubts = (truth - scores.sigmoid()).abs()  # 1 - p_t
    weights = POSITIVE_WEIGHT * truth + (1 - POSITIVE_WEIGHT) * (1 - truth)
    return (weights * doubts**FOCUS * losses).sum()


class RetinaNet(nn.Module):
    """Images [batch, 3, size, size], for A anchors classes [batch, A] (-1 for none) and boxes [batch, A, 4] -> loss per
    anchor with an object.
    """

    def __init__(self, config: RetinaNetConfig) -> None:
        super().__init__()
        self.backbone = Backbone(config.num_layers, config.width)
        self.pyramid = Pyramid(self.backbone.num_channels[1:], config.channels)
        self.classes = PyramidHead(config.channels, config.num_classes, bias=-math.log((1 - PRIOR) / PRIOR))
        self.boxes = PyramidHead(config.channels, 4, bias=0.0)

    def forward(self, images: Tensor, classes: Tensor, boxes: Tensor) -> Tensor:
        levels = self.pyramid(self.backbone(images)[1:])
        counts = [NUM_ANCHORS * level.shape[-1] * level.shape[-2] for level in levels]
        truths, places = torch.split(classes, counts, dim=1), torch.split(boxes, counts, dim=1)
        losses = []
        for level, truth, box in zip(levels, truths, places, strict=True):
            losses.append(focal_loss(self.classes(level), truth))
            distances = functional.smooth_l1_loss(self.boxes(level), box, reduction="none")
            losses.append((distances * (truth >= 0).unsqueeze(-1)).sum())
        return torch.stack(losses).sum() / (classes >= 0).sum().clamp(min=1)


def build(config: RetinaNetConfig) -> Example:
    """The model with one batch of random images, one anchor in a hundred on an object."""
    images = torch.randn(config.batch_size, 3, config.image_size, config.image_size)
    num_anchors = NUM_ANCHORS * sum((config.image_size // stride) ** 2 for stride in STRIDES)
    classes = torch.randint(config.num_classes, (config.batch_size, num_anchors))
    classes = torch.where(torch.rand(classes.shape) < 0.01, classes, -1)
    return RetinaNet(config), (images, classes, torch.randn(config.batch_size, num_anchors, 4)), {}
