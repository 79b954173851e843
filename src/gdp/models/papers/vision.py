"""Parts that the image models share."""

# mypy: disable-error-code=no-any-return

import torch
from torch import Tensor, nn
from torch.nn import functional


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
