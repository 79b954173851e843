"""Parts that the families share: a stream of choices, and small modules that are drawn from it."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

T = TypeVar("T")
Example = tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]
"""A module, and the args and kwargs for which its forward returns the scalar loss."""


class Draws:
    """A stream of random choices."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng

    def one_of(self, *items: T) -> T:
        """Returns one of `items`."""
        return items[int(self.rng.integers(len(items)))]

    def chance(self, share: float) -> bool:
        """Returns True with this probability."""
        return bool(self.rng.random() < share)

    def number(self, low: int, high: int) -> int:
        """Returns an integer from `low` to `high`, both included."""
        return int(self.rng.integers(low, high + 1))

    def size(self, low: int, high: int, multiple: int = 8) -> int:
        """Returns a multiple of `multiple`, log-uniform from `low` to `high`."""
        return max(round(float(np.exp(self.rng.uniform(np.log(low), np.log(high)))) / multiple), 1) * multiple

    def some(self, items: Sequence[T], count: int) -> list[T]:
        """Returns `count` different ones of `items` in their order, or all if they are fewer."""
        chosen = self.rng.choice(len(items), size=min(count, len(items)), replace=False)
        return [items[position] for position in sorted(chosen.tolist())]


class RandomDropout(nn.Module):
    """Dropout as one operator, as on accelerators; none for a share of 0."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        return torch.native_dropout(x, self.share, True)[0] if self.share else x


def activation(name: str) -> nn.Module:
    """Returns the activation called `name`."""
    kinds: dict[str, type[nn.Module]] = {
        "relu": nn.ReLU,
        "gelu": nn.GELU,
        "silu": nn.SiLU,
        "elu": nn.ELU,
        "tanh": nn.Tanh,
        "leaky": nn.LeakyReLU,
    }
    return kinds[name]()


def vector_norm(kind: str, width: int) -> nn.Module:
    """Returns the normalisation over the last dimension called `kind`."""
    if kind == "none":
        return nn.Identity()
    return nn.RMSNorm(width, eps=1e-5) if kind == "rms" else nn.LayerNorm(width)


class ClassLoss(nn.Module):
    """Projects states [..., width] to classes; mean cross-entropy with targets [...]."""

    def __init__(self, width: int, num_classes: int, *, bias: bool = False) -> None:
        super().__init__()
        self.projection = nn.Linear(width, num_classes, bias=bias)

    def forward(self, states: Tensor, targets: Tensor) -> Tensor:
        logits = self.projection(states)
        return functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))


class ValueLoss(nn.Module):
    """Predicts values [..., outputs] from states [..., width]; mean squared error or smooth absolute error."""

    def __init__(self, width: int, num_outputs: int, *, is_smooth: bool) -> None:
        super().__init__()
        self.projection = nn.Linear(width, num_outputs)
        self.is_smooth = is_smooth

    def forward(self, states: Tensor, values: Tensor) -> Tensor:
        measure = functional.smooth_l1_loss if self.is_smooth else functional.mse_loss
        return measure(self.projection(states), values)


class WeightedSum(nn.Module):
    """Adds tensors of one shape with learned weights: sigmoids, a softmax, or plain numbers."""

    def __init__(self, count: int, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.weights = nn.Parameter(torch.ones(count))

    def forward(self, tensors: Sequence[Tensor]) -> Tensor:
        weights: Tensor = self.weights
        if self.kind == "softmax":
            weights = weights.softmax(0)
        elif self.kind == "sigmoid":
            weights = weights.sigmoid()
        total = tensors[0] * weights[0]
        for number, tensor in enumerate(tensors[1:], 1):
            total = total + tensor * weights[number]
        return total


class PlainMLP(nn.Module):
    """Linear layers of these widths with activations between, and residual connections between equal widths."""

    def __init__(self, widths: Sequence[int], act: str, *, norm: str = "none", residual: bool = False) -> None:
        super().__init__()
        pairs = list(pairwise(widths))
        self.layers = nn.ModuleList(nn.Linear(inputs, outputs) for inputs, outputs in pairs)
        self.norms = nn.ModuleList(vector_norm(norm, outputs) for _, outputs in pairs)
        self.act, self.residual = activation(act), residual

    def forward(self, x: Tensor) -> Tensor:
        for number, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
            y = norm(layer(x))
            y = self.act(y) if number < len(self.layers) - 1 else y
            x = x + y if self.residual and x.shape == y.shape else y
        return x
