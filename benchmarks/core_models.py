"""Models of benchmark `cores`, with inputs that a core steps in about a second."""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.torchvision_stand_in import torchvision_stand_in

Example = tuple[nn.Module, tuple[Tensor, ...]]
_WORDS = 5_000


class Squared(nn.Module):
    """The mean square of what a model returns, as a loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> Tensor:
        loss: Tensor = self.model(*inputs).float().square().mean()
        return loss


class RecurrentText(nn.Module):
    """Two layers of GRUs that predict words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layers = nn.Embedding(_WORDS, 256), nn.GRU(256, 512, 2, batch_first=True)
        self.head = nn.Linear(512, _WORDS)

    def forward(self, words: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.layers(self.words(words))[0]).flatten(0, 1), words.flatten())


class Recommender(nn.Module):
    """Sums of embeddings, and layers over all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(20_000, 64, mode="sum") for _ in range(8))
        self.layers = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, rows: Tensor) -> Tensor:
        sums = [table(rows[:, number]) for number, table in enumerate(self.tables)]
        result: Tensor = self.layers(torch.cat(sums, 1))
        return result


class Mixer(nn.Module):
    """Layers over patches, and over channels, in turn."""

    def __init__(self, width: int = 256, patches: int = 196, depth: int = 4) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 16, 16)
        self.over_patches = nn.ModuleList(_perceptron(patches, 128) for _ in range(depth))
        self.over_channels = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), _perceptron(width, 4 * width)) for _ in range(depth)
        )

    def forward(self, images: Tensor) -> Tensor:
        x: Tensor = self.first(images).flatten(2).transpose(1, 2)
        for patches, channels in zip(self.over_patches, self.over_channels, strict=True):
            x = x + patches(x.transpose(1, 2)).transpose(1, 2)
            x = x + channels(x)
        return x


def _perceptron(width: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


def _autoencoder() -> nn.Module:
    sizes = 3, 32, 64, 128
    down = [nn.Sequential(nn.Conv2d(a, b, 4, 2, 1), nn.ReLU()) for a, b in pairwise(sizes)]
    back = sizes[::-1]
    up = [nn.Sequential(nn.ConvTranspose2d(a, b, 4, 2, 1), nn.ReLU()) for a, b in pairwise(back)]
    return nn.Sequential(*down, *up)


def _signals() -> nn.Module:
    sizes = 16, 64, 64, 64, 64, 64, 64
    layers = [(nn.Conv1d(a, b, 9, padding=4), nn.BatchNorm1d(b), nn.ReLU()) for a, b in pairwise(sizes)]
    return nn.Sequential(*(layer for block in layers for layer in block))


def _volumes() -> nn.Module:
    first, second = nn.Conv3d(4, 32, 3, padding=1), nn.Conv3d(32, 32, 3, padding=1)
    return nn.Sequential(first, nn.GELU(), second, nn.GELU(), nn.Conv3d(32, 64, 3, 2, 1))


def _encoder() -> nn.Module:
    return nn.TransformerEncoder(
        nn.TransformerEncoderLayer(256, 8, 1024, batch_first=True), 4, enable_nested_tensor=False
    )


def _squared(make: Callable[[], nn.Module], *size: int) -> Example:
    return Squared(make()), (torch.randn(size),)


def _of_timm(name: str, side: int) -> Example:
    with torchvision_stand_in():
        import timm

        return Squared(timm.create_model(name, num_classes=100)), (torch.randn(4, 3, side, side),)


MODELS: Mapping[str, Callable[[], Example]] = MappingProxyType(
    {
        "gru": lambda: (RecurrentText(), (torch.randint(_WORDS, (16, 48)),)),
        "autoencoder": partial(_squared, _autoencoder, 32, 3, 64, 64),
        "signals": partial(_squared, _signals, 16, 16, 1024),
        "volumes": partial(_squared, _volumes, 4, 4, 16, 32, 32),
        "mixer": partial(_squared, Mixer, 8, 3, 224, 224),
        "recommender": lambda: (Squared(Recommender()), (torch.randint(20_000, (512, 8, 4)),)),
        "encoder": partial(_squared, _encoder, 16, 128, 256),
        **{
            name: partial(_of_timm, name, side)
            for name, side in (
                ("mobilenetv3_small_100", 128),
                ("convnext_atto", 96),
                ("resnet18", 96),
                ("efficientnet_b0", 96),
                ("swin_tiny_patch4_window7_224", 224),
                ("regnety_004", 96),
            )
        },
    }
)
