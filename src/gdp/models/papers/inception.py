"""Inception-v3. Source: Szegedy et al. 2016 (arXiv 1512.00567), with the layer sizes of the TensorFlow-Slim release."""

# mypy: disable-error-code=no-any-return

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from gdp.models.papers.base import Classifier, Example, ModelConfig, random_images


@dataclass(frozen=True, slots=True)
class InceptionConfig(ModelConfig):
    """Sizes of one batch; `width_divisor` divides every number of channels (for tests)."""

    batch_size: int
    image_size: int = 299
    num_classes: int = 1000
    width_divisor: int = 1
    dropout: float = 0.5


class Convolution(nn.Module):
    """Convolution, batch normalisation, rectifier."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int | tuple[int, int], stride: int = 1, padding: int | str = 0
    ) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False)
        self.norm = nn.BatchNorm2d(outputs, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.norm(self.convolution(x)))


class InceptionPool(nn.Module):
    """3 x 3 pooling: the average at stride 1, or the maximum at stride 2."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        return functional.avg_pool2d(x, 3, 1, 1) if self.kind == "average" else functional.max_pool2d(x, 3, 2)


class Fork(nn.Module):
    """A convolution whose output feeds two further ones side by side (figure 7)."""

    def __init__(self, *before: nn.Module, left: nn.Module, right: nn.Module) -> None:
        super().__init__()
        self.before, self.left, self.right = nn.Sequential(*before), left, right

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        return torch.cat((self.left(x), self.right(x)), dim=1)


class Mixed(nn.Module):
    """Branches side by side, their channels concatenated."""

    def __init__(self, **branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleDict(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches.values()], dim=1)


def mixed_35(inputs: int, pool: int, divisor: int) -> Mixed:
    """Figure 5, at 35 x 35: `224 + pool` channels."""
    c48, c64, c96, pool = 48 // divisor, 64 // divisor, 96 // divisor, pool // divisor
    return Mixed(
        direct=Convolution(inputs, c64, 1),
        five=nn.Sequential(Convolution(inputs, c48, 1), Convolution(c48, c64, 5, padding=2)),
        double_three=nn.Sequential(
            Convolution(inputs, c64, 1), Convolution(c64, c96, 3, padding=1), Convolution(c96, c96, 3, padding=1)
        ),
        pool=nn.Sequential(InceptionPool("average"), Convolution(inputs, pool, 1)),
    )


def reduction_35(inputs: int, divisor: int) -> Mixed:
    """35 x 35 to 17 x 17: 480 more channels."""
    c64, c96, c384 = 64 // divisor, 96 // divisor, 384 // divisor
    double = Convolution(inputs, c64, 1), Convolution(c64, c96, 3, padding=1), Convolution(c96, c96, 3, stride=2)
    three = Convolution(inputs, c384, 3, stride=2)
    return Mixed(three=three, double_three=nn.Sequential(*double), pool=InceptionPool("maximum"))


def mixed_17(inputs: int, inner: int, divisor: int) -> Mixed:
    """Figure 6, n = 7, at 17 x 17: 768 channels."""
    c, c192 = inner // divisor, 192 // divisor

    def row(inputs: int, outputs: int) -> Convolution:
        return Convolution(inputs, outputs, (1, 7), padding="same")

    def column(inputs: int, outputs: int) -> Convolution:
        return Convolution(inputs, outputs, (7, 1), padding="same")

    return Mixed(
        direct=Convolution(inputs, c192, 1),
        seven=nn.Sequential(Convolution(inputs, c, 1), row(c, c), column(c, c192)),
        double_seven=nn.Sequential(Convolution(inputs, c, 1), column(c, c), row(c, c), column(c, c), row(c, c192)),
        pool=nn.Sequential(InceptionPool("average"), Convolution(inputs, c192, 1)),
    )


def reduction_17(inputs: int, divisor: int) -> Mixed:
    """17 x 17 to 8 x 8: 512 more channels."""
    c192, c320 = 192 // divisor, 320 // divisor
    return Mixed(
        three=nn.Sequential(Convolution(inputs, c192, 1), Convolution(c192, c320, 3, stride=2)),
        seven=nn.Sequential(
            Convolution(inputs, c192, 1),
            Convolution(c192, c192, (1, 7), padding="same"),
            Convolution(c192, c192, (7, 1), padding="same"),
            Convolution(c192, c192, 3, stride=2),
        ),
        pool=InceptionPool("maximum"),
    )


def mixed_8(inputs: int, divisor: int) -> Mixed:
    """Figure 7, at 8 x 8: 2048 channels."""
    c192, c320, c384, c448 = 192 // divisor, 320 // divisor, 384 // divisor, 448 // divisor

    def fork(*before: nn.Module) -> Fork:
        left, right = (Convolution(c384, c384, kernel, padding="same") for kernel in ((1, 3), (3, 1)))
        return Fork(*before, left=left, right=right)

    return Mixed(
        direct=Convolution(inputs, c320, 1),
        three=fork(Convolution(inputs, c384, 1)),
        double_three=fork(Convolution(inputs, c448, 1), Convolution(c448, c384, 3, padding=1)),
        pool=nn.Sequential(InceptionPool("average"), Convolution(inputs, c192, 1)),
    )


class Inception(nn.Module):
    """Images [batch, 3, size, size] and labels [batch] -> mean cross-entropy."""

    def __init__(self, config: InceptionConfig) -> None:
        super().__init__()
        d = config.width_divisor
        c32, c64, c80, c192 = 32 // d, 64 // d, 80 // d, 192 // d
        before = Convolution(3, c32, 3, stride=2), Convolution(c32, c32, 3), Convolution(c32, c64, 3, padding=1)
        after = InceptionPool("maximum"), Convolution(c64, c80, 1), Convolution(c80, c192, 3), InceptionPool("maximum")
        self.stem = nn.Sequential(*before, *after)
        self.blocks_35 = nn.Sequential(
            mixed_35(c192, 32, d), mixed_35(256 // d, 64, d), mixed_35(288 // d, 64, d), reduction_35(288 // d, d)
        )
        c768 = 768 // d
        self.blocks_17 = nn.Sequential(*(mixed_17(c768, inner, d) for inner in (128, 160, 160, 192)))
        self.blocks_8 = nn.Sequential(reduction_17(c768, d), mixed_8(1280 // d, d), mixed_8(2048 // d, d))
        self.classifier = Classifier(2048 // d, config.num_classes, config.dropout)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        features = self.blocks_8(self.blocks_17(self.blocks_35(self.stem(images))))
        return self.classifier(features, labels)


def build(config: InceptionConfig) -> Example:
    """The model with one batch of random images."""
    return Inception(config), random_images(config.batch_size, config.image_size, config.num_classes), {}
