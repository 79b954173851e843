"""ConvMixer: depthwise convolutions over space, then pointwise ones over channels. Source: Trockman and Kolter 2022
(arXiv 2201.09792).
"""

from dataclasses import dataclass

from torch import Tensor, nn

from gdp.models.papers.base import Classifier, Example, ModelConfig, random_images


@dataclass(frozen=True, slots=True)
class ConvMixerConfig(ModelConfig):
    """Sizes of one batch and of the model."""

    batch_size: int
    num_layers: int = 8
    channels: int = 256
    kernel_size: int = 7
    patch_size: int = 4
    image_size: int = 64
    num_classes: int = 100


def normalised(convolution: nn.Conv2d) -> nn.Sequential:
    """A convolution, GELU and batch normalisation."""
    return nn.Sequential(convolution, nn.GELU(), nn.BatchNorm2d(convolution.out_channels))


class ConvMixer(nn.Module):
    """Images [batch, 3, size, size] and labels [batch] -> mean cross-entropy."""

    def __init__(self, config: ConvMixerConfig) -> None:
        super().__init__()
        channels, size = config.channels, config.kernel_size
        self.stem = normalised(nn.Conv2d(3, channels, config.patch_size, config.patch_size))
        self.over_space = nn.ModuleList(
            normalised(nn.Conv2d(channels, channels, size, padding="same", groups=channels))
            for _ in range(config.num_layers)
        )
        self.over_channels = nn.ModuleList(
            normalised(nn.Conv2d(channels, channels, 1)) for _ in range(config.num_layers)
        )
        self.classifier = Classifier(channels, config.num_classes, 0.0)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(images)
        for over_space, over_channels in zip(self.over_space, self.over_channels, strict=True):
            x = over_channels(x + over_space(x))
        return self.classifier(x, labels)  # type: ignore[no-any-return]


def build(config: ConvMixerConfig) -> Example:
    """The model with one batch of random images."""
    return ConvMixer(config), random_images(config.batch_size, config.image_size, config.num_classes), {}
