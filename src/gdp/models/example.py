"""A built MODEL, (module, args, kwargs): the batch of its inputs, a part of that, and another type of numbers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from gdp.errors import InputError, UnevenBatchError
from gdp.models.model import even_part
from gdp.models.pytorch.own_step import has_own_step
from gdp.models.user_function import Example, JaxFunction


def is_own_step(model: Any) -> bool:
    """Returns whether a user's function gave a training step of its own, which is captured as it is."""
    return not isinstance(model, nn.Module) or has_own_step(model)


def batch_size(example: Example, dim: int = 0) -> int | None:
    """Returns the size of dimension `dim` of the first input tensor that has one."""
    sizes = (leaf.shape[dim] for leaf in tree_leaves(example[1:]) if isinstance(leaf, Tensor) and leaf.dim() > dim)
    return next(sizes, None)


def note_time_steps(model: nn.Module, steps: list[int]) -> None:
    """Lets each call of a recurrent layer of PyTorch's, which is one op or many, add its time steps to `steps`."""

    def note(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs.get("input")
        if isinstance(x, Tensor):
            steps.append(x.shape[int(bool(layer.batch_first) and x.dim() > 2)])

    for layer in model.modules():
        if isinstance(layer, nn.RNNBase):
            layer.register_forward_pre_hook(note, with_kwargs=True)


def splitter(answer: Example | JaxFunction, num_parts: int, text: str, dim: int = 0) -> Callable[[Any], Any]:
    """Returns a function that cuts the first of `num_parts` out of each input that has the batch as dimension `dim`. An
    input of one dimension may have it alone. InputError, with the MODEL `text`, for one that is not split."""
    if isinstance(answer, JaxFunction):
        raise UnevenBatchError(
            f"--microbatches: {text} is a JAX function, which is not split; gdp capture the step of one "
            "micro-batch, and give that file"
        )
    if is_own_step(answer[0]):
        raise UnevenBatchError(
            f"--microbatches: {text} is a training step of your own, which is not split; give its module with "
            "--optimizer"
        )
    size = batch_size(answer, dim)
    if size is None:
        raise InputError(f"{text}: no input is a tensor with a batch as dimension {dim}; micro-batches need one")
    part = even_part(size, num_parts, text)

    def split(leaf: Any) -> Any:
        cut = _batch_dim(leaf, dim, size)
        return leaf if cut is None else leaf.narrow(cut, 0, part).clone()

    return split


def first_part(example: Example, num_parts: int, text: str, dim: int = 0) -> Example:
    """Returns (module, args, kwargs) with the first of `num_parts` parts of the batch; see `splitter`."""
    module, args, kwargs = example
    split = splitter(example, num_parts, text, dim)
    return module, tree_map(split, args), tree_map(split, kwargs)


def with_batch(answer: Example | JaxFunction, samples: int, text: str, dim: int = 0) -> Example:
    """Returns the model with inputs of this number of samples: the first ones, or all of them again and again. Which
    inputs, and dimensions, have the batch is as in `splitter`."""
    if isinstance(answer, JaxFunction) or is_own_step(answer[0]):
        raise InputError(f"--batch: {text} has its inputs in its step, whose batch stays as it is; leave it out")
    module, args, kwargs = answer if len(answer) == 3 else (*answer, {})
    size = batch_size(answer, dim)
    if not size:
        raise InputError(f"--batch: no input of {text} is a tensor with a batch as dimension {dim}; leave it out")

    def resize(leaf: Any) -> Any:
        cut = _batch_dim(leaf, dim, size)
        if cut is None:
            return leaf
        times = leaf.unsqueeze(cut).expand(*leaf.shape[:cut], -(-samples // size), *leaf.shape[cut:])
        return times.flatten(cut, cut + 1).narrow(cut, 0, samples).clone()

    return module, tree_map(resize, args), tree_map(resize, kwargs)


def _batch_dim(leaf: Any, dim: int, size: int) -> int | None:
    """Returns the dimension of an input that is the batch: `dim`, or its only one, where that has `size`."""
    if not isinstance(leaf, Tensor) or not leaf.dim():
        return None
    cut = min(dim, leaf.dim() - 1) if leaf.dim() > dim or leaf.dim() == 1 else None
    return cut if cut is not None and leaf.shape[cut] == size else None


def converted(answer: Example | JaxFunction, dtype: str) -> Example | JaxFunction:
    """Returns the model with floats of the module and its inputs in `dtype`, as `module.to(dtype)` makes them."""
    if isinstance(answer, JaxFunction):
        return answer

    def convert(leaf: Any) -> Any:
        is_float = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.to(getattr(torch, dtype)) if is_float else leaf

    module, args, kwargs = answer if len(answer) == 3 else (*answer, {})
    return module._apply(convert), tree_map(convert, args), tree_map(convert, kwargs)
