"""The vision transformer. Source: Dosovitskiy et al. 2020 (arXiv 2010.11929), section 3.1 and table 1."""

# mypy: disable-error-code=no-any-return

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.models.transformer import TransformerLayer, check_heads
from gdp.errors import InputError
from gdp.models.papers.base import Example, ModelConfig, random_images


@dataclass(frozen=True, slots=True)
class ViTConfig(ModelConfig):
    """Sizes of the model (ViT-L/16: 24 layers of 1024, patches of 16 pixels) and of one batch."""

    batch_size: int
    num_layers: int = 24
    hidden: int = 1024
    num_heads: int = 16
    patch_size: int = 16
    image_size: int = 224
    num_classes: int = 1000
    dropout: float = 0.1

    def __post_init__(self) -> None:
        ModelConfig.__post_init__(self)
        check_heads(type(self).__name__, self.hidden, self.num_heads)
        check_patches(type(self).__name__, self.image_size, self.patch_size)


def check_patches(name: str, image_size: int, patch_size: int) -> None:
    """Raises InputError unless patches cover the image."""
    if image_size % patch_size:
        raise InputError(f"{name}: image_size is {image_size}; a multiple of patch_size ({patch_size}) is expected")


class Patches(nn.Module):
    """Images -> a learnt vector, then one for each patch, with positions: [batch, 1 + patches, hidden]."""

    def __init__(self, image_size: int, patch_size: int, hidden: int, *, bias: bool = True) -> None:
        super().__init__()
        num_patches = (image_size // patch_size) ** 2
        self.project = nn.Conv2d(3, hidden, patch_size, patch_size, bias=bias)
        self.first = nn.Parameter(torch.zeros(1, 1, hidden))
        self.positions = nn.Parameter(torch.empty(1 + num_patches, hidden).normal_(std=0.02))

    def forward(self, images: Tensor) -> Tensor:
        patches = self.project(images).flatten(2).transpose(1, 2)
        return torch.cat((self.first.expand(len(images), -1, -1), patches), dim=1) + self.positions


class ViT(nn.Module):
    """Images [batch, 3, size, size] and labels [batch] -> mean cross-entropy."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.patches = Patches(config.image_size, config.patch_size, config.hidden)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(
            TransformerLayer(config.hidden, config.num_heads, dropout=config.dropout) for _ in range(config.num_layers)
        )
        self.norm = nn.LayerNorm(config.hidden)
        self.classes = nn.Linear(config.hidden, config.num_classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.dropout(self.patches(images))
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.classes(self.norm(x[:, 0])), labels)


def build(config: ViTConfig) -> Example:
    """The model with one batch of random images."""
    return ViT(config), random_images(config.batch_size, config.image_size, config.num_classes), {}
