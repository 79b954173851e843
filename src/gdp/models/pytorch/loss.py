"""The loss that a training step takes of a model's output."""

from collections.abc import Callable, Mapping, Sequence
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


def has_loss(output: Any) -> bool:
    """Returns whether a model's output has its loss, so that no other output counts without `loss`."""
    return _own_loss(output, _floats(output)) is not None


def _default_loss(output: Any, name: str) -> Tensor:
    floats = _floats(output)
    if (own := _own_loss(output, floats)) is not None:
        return own
    if not floats:
        raise InputError(f"{name}: no output requires a gradient; unfreeze parameters or capture with training=False")
    return reduce(add, (tensor.mean() for tensor in floats))


def _floats(output: Any) -> list[Tensor]:
    tensors = [tensor for _, tensor in named_tensors(output, "")]
    return [tensor for tensor in tensors if tensor.is_floating_point() and tensor.requires_grad]


def _own_loss(output: Any, floats: Sequence[Tensor]) -> Tensor | None:
    """Returns the output that is called loss, or the only one of `floats` that is a scalar."""
    value = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(value, Tensor):
        return value
    scalars = [tensor for tensor in floats if tensor.dim() == 0]
    return scalars[0] if len(scalars) == 1 else None
