"""The loss that a training step takes of a model's output."""

from collections.abc import Callable, Mapping
from functools import reduce
from operator import add
from typing import Any

from torch import Tensor

from gdp.errors import InputError
from gdp.models.pytorch.program import named_tensors

Loss = Callable[[Any], Tensor]


def pick_loss(output: Any, loss: Loss | None, name: str) -> Tensor:
    """Returns the loss that `capture` takes of a model's output; InputError, naming the model `name`, without one."""
    value = loss(output) if loss is not None else _default_loss(output, name)
    if not isinstance(value, Tensor) or value.numel() != 1:
        kind = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise InputError(f"{name}: the loss is {kind}; a scalar tensor is expected, let loss= return one")
    if not value.requires_grad:
        raise InputError(f"{name}: the loss requires no gradient; unfreeze parameters or capture with training=False")
    return value


def _default_loss(output: Any, name: str) -> Tensor:
    value = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(value, Tensor):
        return value
    tensors = [tensor for _, tensor in named_tensors(output, "")]
    floats = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.requires_grad]
    if not floats:
        raise InputError(f"{name}: no output requires a gradient; unfreeze parameters or capture with training=False")
    scalars = [tensor for tensor in floats if tensor.dim() == 0]
    if len(scalars) == 1:
        return scalars[0]
    return reduce(add, (tensor.mean() for tensor in floats))
