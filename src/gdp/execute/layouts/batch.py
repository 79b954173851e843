"""Batch: the inputs of a whole step, and the part of them that each micro-batch gets."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from gdp.errors import InputError
from gdp.models.pytorch.program import named_inputs

Sizes = Mapping[str, Sequence[int]]  # the sizes of input tensors, by name


def split_inputs(
    args: Sequence[Any], kwargs: Mapping[str, Any], num_parts: int, sizes: Sizes | None = None
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yields the inputs of each of `num_parts` equal parts of the batch; tensors are views. `sizes` are those of a
    part: a tensor is cut along the dimension that is larger, and all parts share one that is not. Without `sizes` they
    are those of `part_sizes`. InputError where a tensor cannot be cut so."""
    tensors = dict(named_inputs(args, kwargs))
    dims = _larger_dims(tensors, sizes or part_sizes(args, kwargs, num_parts), num_parts)
    by_identity = {id(tensor): dims[name] for name, tensor in tensors.items()}
    for part in range(num_parts):

        def cut(tensor: Tensor, part: int = part) -> Tensor:
            dim = by_identity[id(tensor)]
            if dim is None:
                return tensor
            size = tensor.shape[dim] // num_parts
            return tensor.narrow(dim, part * size, size)

        yield mapped_tensors((tuple(args), dict(kwargs)), cut)


def first_part(
    args: Sequence[Any], kwargs: Mapping[str, Any], num_parts: int, sizes: Sizes | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the inputs of the first part of the batch, in memory of their own, as a capture takes them."""
    wholes = {id(tensor) for _, tensor in named_inputs(args, kwargs)}

    def alone(tensor: Tensor) -> Tensor:
        return tensor if id(tensor) in wholes else tensor.clone()

    part: tuple[Any, dict[str, Any]] = mapped_tensors(next(split_inputs(args, kwargs, num_parts, sizes)), alone)
    return part


def part_sizes(args: Sequence[Any], kwargs: Mapping[str, Any], num_parts: int, batch_size: int | None = None) -> Sizes:
    """Returns the sizes of inputs with 1 / `num_parts` of the batch. It is the first dimension of the first tensor, and
    of others that begin with it; or, where `batch_size` is that of another dimension, the first one of this size in
    each tensor."""
    shapes = {name: tuple(tensor.shape) for name, tensor in named_inputs(args, kwargs)}
    first = next((shape for shape in shapes.values() if shape), None)
    if first is None:
        raise InputError("no input is a tensor with a batch dimension; place with --parallel none")
    is_first = batch_size is None or batch_size == first[0] or batch_size not in first
    batch = first[0] if is_first or batch_size is None else batch_size
    if batch % num_parts:
        raise InputError(
            f"the batch of {batch} samples has no {num_parts} equal parts, as the plan has it; give a batch of the "
            "size that was placed (drop_last=True with a DataLoader)"
        )

    def of_part(shape: tuple[int, ...]) -> tuple[int, ...]:
        if batch not in (shape[:1] if is_first else shape):
            return shape
        dim = shape.index(batch)
        return (*shape[:dim], batch // num_parts, *shape[dim + 1 :])

    return {name: of_part(shape) for name, shape in shapes.items()}


def _larger_dims(tensors: Mapping[str, Tensor], sizes: Sizes, num_parts: int) -> dict[str, int | None]:
    dims: dict[str, int | None] = {}
    is_one_part = num_parts > 1 and all(list(x.shape) == list(sizes.get(name, x.shape)) for name, x in tensors.items())
    for name, tensor in tensors.items():
        here, part = tuple(tensor.shape), tuple(sizes.get(name, tensor.shape))
        larger = [dim for dim, (one, other) in enumerate(zip(here, part, strict=False)) if one != other]
        fits = len(here) == len(part) and all(here[dim] == num_parts * part[dim] for dim in larger)
        if not fits or len(larger) > 1 or is_one_part:
            raise InputError(
                f"input {name!r} is {list(here)}, and one of {num_parts} parts of the batch {list(part)}; give a whole "
                "batch of the size that was placed (drop_last=True with a DataLoader)"
            )
        dims[name] = larger[0] if larger else None
    return dims


def mapped_tensors(item: Any, function: Callable[[Tensor], Any]) -> Any:
    """Returns `item` with `function` of each tensor in nested lists, tuples, mappings and dataclasses."""
    if isinstance(item, Tensor):
        return function(item)
    if isinstance(item, Mapping):
        changed = {key: mapped_tensors(child, function) for key, child in item.items()}
        return changed if type(item) is dict else type(item)(changed)  # type: ignore[call-arg]
    if hasattr(item, "_fields"):
        return type(item)(*(mapped_tensors(child, function) for child in item))
    if isinstance(item, (list, tuple)):
        return type(item)([mapped_tensors(child, function) for child in item])
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        names = [field.name for field in dataclasses.fields(item) if field.init]
        return dataclasses.replace(item, **{name: mapped_tensors(getattr(item, name), function) for name in names})
    return item
