"""Parts that the model families share: checks of sizes, modules, random images."""

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gdp.errors import InputError

Example = tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]
"""A module, and the args and kwargs for which its forward returns the scalar loss."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of a model and of one batch. Raises InputError unless integers are at least 1 and fractions from 0 to 1."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            where = f"{type(self).__name__}: {item.name} is {value!r}"
            if item.type in (int, "int") and (type(value) is not int or value < 1):
                raise InputError(f"{where}; an integer of at least 1 is expected")
            if item.type in (float, "float") and not (isinstance(value, float) and 0 <= value < 1):
                raise InputError(f"{where}; a number of at least 0 and below 1 is expected")


class SoftmaxLoss(nn.Module):
    """Projection to the vocabulary and mean cross-entropy: states [..., hidden], targets [...] -> scalar."""

    def __init__(self, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.projection = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, states: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(self.projection(states.flatten(0, -2)), targets.flatten())


class WordEmbedding(nn.Module):
    """Token vectors drawn from a normal distribution of deviation `deviation`: [...] -> [..., hidden]."""

    def __init__(self, vocabulary: int, hidden: int, deviation: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary, hidden).normal_(std=deviation))

    def forward(self, tokens: Tensor) -> Tensor:
        return functional.embedding(tokens, self.weight)


class Classifier(nn.Module):
    """Mean over the image, dropout, linear: features and labels [batch] -> mean cross-entropy."""

    def __init__(self, inputs: int, num_classes: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.linear = nn.Linear(inputs, num_classes)

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.linear(self.dropout(features.mean(dim=(2, 3)))), labels)


def random_images(batch_size: int, image_size: int, num_classes: int) -> tuple[Tensor, Tensor]:
    """Images [batch, 3, size, size] and labels [batch]."""
    images = torch.randn(batch_size, 3, image_size, image_size)
    return images, torch.randint(num_classes, (batch_size,))
