"""CLIP: an image and a text tower, independent until every image is compared with every text. Source: Radford et al.
2021 (arXiv 2103.00020), section 2 and figure 3; sizes from the authors' release.
"""

# mypy: disable-error-code=no-any-return

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.models.transformer import TransformerLayer, check_heads
from benchmarks.models.vit import Patches, check_patches
from gdp.models.papers.base import Example, ModelConfig, WordEmbedding

SHARPNESS = 2.6593  # ln(1 / 0.07), section 2.5
DEVIATION = 0.02


@dataclass(frozen=True, slots=True)
class CLIPConfig(ModelConfig):
    """Sizes of the model (ViT-B/16) and of one batch of pairs; a head is 64 wide."""

    batch_size: int
    num_layers: int = 12
    image_hidden: int = 768
    text_hidden: int = 512
    shared: int = 512
    patch_size: int = 16
    image_size: int = 224
    num_steps: int = 77
    vocabulary: int = 49408
    head: int = 64

    def __post_init__(self) -> None:
        ModelConfig.__post_init__(self)
        for hidden in (self.image_hidden, self.text_hidden):
            check_heads(type(self).__name__, hidden, max(1, hidden // self.head))
        check_patches(type(self).__name__, self.image_size, self.patch_size)


class ImageTower(nn.Module):
    """Images -> [batch, shared]."""

    def __init__(self, config: CLIPConfig) -> None:
        super().__init__()
        hidden = config.image_hidden
        self.patches = Patches(config.image_size, config.patch_size, hidden, bias=False)
        self.first_norm = nn.LayerNorm(hidden)
        num_heads = max(1, hidden // config.head)
        self.layers = nn.Sequential(*(TransformerLayer(hidden, num_heads) for _ in range(config.num_layers)))
        self.last_norm = nn.LayerNorm(hidden)
        self.project = nn.Linear(hidden, config.shared, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        x = self.layers(self.first_norm(self.patches(images)))
        return self.project(self.last_norm(x[:, 0]))


class TextTower(nn.Module):
    """Tokens [batch, steps] -> [batch, shared], from the place of the greatest token, which ends the text."""

    def __init__(self, config: CLIPConfig) -> None:
        super().__init__()
        hidden = config.text_hidden
        self.words = WordEmbedding(config.vocabulary, hidden, DEVIATION)
        self.positions = nn.Parameter(torch.empty(config.num_steps, hidden).normal_(std=DEVIATION))
        num_heads = max(1, hidden // config.head)
        self.layers = nn.Sequential(
            *(TransformerLayer(hidden, num_heads, causal=True) for _ in range(config.num_layers))
        )
        self.norm = nn.LayerNorm(hidden)
        self.project = nn.Linear(hidden, config.shared, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.layers(self.words(tokens) + self.positions))
        end = tokens.argmax(dim=1)[:, None, None].expand(-1, 1, x.shape[-1])
        return self.project(x.gather(1, end).squeeze(1))


class CLIP(nn.Module):
    """Images [batch, 3, size, size] and their texts [batch, steps] -> mean cross-entropy over rows and columns."""

    def __init__(self, config: CLIPConfig) -> None:
        super().__init__()
        self.image = ImageTower(config)
        self.text = TextTower(config)
        self.sharpness = nn.Parameter(torch.tensor(SHARPNESS))

    def forward(self, images: Tensor, tokens: Tensor) -> Tensor:
        image, text = functional.normalize(self.image(images)), functional.normalize(self.text(tokens))
        scores = self.sharpness.exp() * image @ text.T
        pairs = torch.arange(len(images), device=images.device)
        return (functional.cross_entropy(scores, pairs) + functional.cross_entropy(scores.T, pairs)) / 2


def build(config: CLIPConfig) -> Example:
    """The model with one batch of random images and texts."""
    images = torch.randn(config.batch_size, 3, config.image_size, config.image_size)
    return CLIP(config), (images, torch.randint(config.vocabulary, (config.batch_size, config.num_steps))), {}
