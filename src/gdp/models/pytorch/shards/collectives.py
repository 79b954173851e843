"""Exchanges among the ranks of a group, as operators that captures record, and their pairs of forward and backward.

    enter    forward: nothing                   backward: all-reduce      a whole tensor that cut work reads
    leave    forward: all-reduce                backward: nothing         partial sums become whole
    own      forward: one's part                backward: all-gather      a whole tensor becomes cut
    gather   forward: all-gather                backward: one's part, or reduce-scatter where cut work reads the result
    scatter  forward: reduce-scatter            backward: all-gather      partial sums become cut
    exchange forward: all-to-all                backward: all-to-all      rows go to their experts' ranks

Fake tensors have one rank's size. A step is executed on what all ranks send; see `gdp.execute.layouts.sharded_program`.
"""

# mypy: disable-error-code="no-any-return,no-untyped-call"

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gdp.models.pytorch.shards.cuts import joined, part

ops = torch.ops.collective
_LIBRARY = torch.library.Library("collective", "DEF")


def _same(x: Tensor, num_ranks: int, stride: int = 1) -> Tensor:
    return x.new_empty(x.shape)


def _gathered(x: Tensor, num_ranks: int, dim: int) -> Tensor:
    return x.new_empty([size * num_ranks if place == dim else size for place, size in enumerate(x.shape)])


def _scattered(x: Tensor, num_ranks: int, dim: int) -> Tensor:
    return x.new_empty([size // num_ranks if place == dim else size for place, size in enumerate(x.shape)])


for _name, _fake in (
    ("all_reduce", _same),
    ("all_reduce.max", _same),
    ("all_gather", _gathered),
    ("reduce_scatter", _scattered),
    ("all_to_all", _same),
    ("send", _same),
):
    _options = ", int dim" * (_fake is not _same) + ", int stride=1" * (_name == "all_to_all")
    _LIBRARY.define(f"{_name}(Tensor x, int num_ranks{_options}) -> Tensor")
    torch.library.register_fake(f"collective::{_name}", _fake, lib=_LIBRARY)


def _sum_of(_rank: int, parts: Sequence[Tensor]) -> Tensor:
    return functools.reduce(torch.add, parts)


OF_ALL_RANKS: Mapping[Any, Callable[..., Tensor]] = {  # from a rank and what all ranks send, to what this one gets
    ops.all_reduce.default: _sum_of,
    ops.all_reduce.max: lambda rank, parts: functools.reduce(torch.maximum, parts),
    ops.all_gather.default: lambda rank, parts, dim: torch.cat(parts, dim),
    ops.reduce_scatter.default: lambda rank, parts, dim: _sum_of(rank, [x.chunk(len(parts), dim)[rank] for x in parts]),
    ops.all_to_all.default: lambda rank, parts, *_: torch.cat([x.chunk(len(parts))[rank] for x in parts]),
    ops.send.default: lambda rank, parts: parts[rank - 1].clone(),
}


def partners_of(call: Any, rank: int) -> range:
    """Returns the ranks that exchange with `rank` in a call; the smaller groups of a group stand behind each other."""
    stride = call.args[2] if call.func is ops.all_to_all.default and len(call.args) > 2 else 1
    first = rank - rank // stride % call.args[1] * stride
    return range(first, first + call.args[1] * stride, stride)


class Enter(torch.autograd.Function):
    """Hands a whole tensor to cut work; its gradient is the sum of those of all ranks."""

    @staticmethod
    def forward(context: Any, x: Tensor, num_ranks: int) -> Tensor:
        context.num_ranks = num_ranks
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ops.all_reduce(gradient, context.num_ranks), None


class Leave(torch.autograd.Function):
    """Sums up the partial results of all ranks."""

    @staticmethod
    def forward(context: Any, x: Tensor, num_ranks: int) -> Tensor:
        result: Tensor = ops.all_reduce(x, num_ranks)
        return result

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Own(torch.autograd.Function):
    """Takes this rank's part of a whole tensor."""

    @staticmethod
    def forward(context: Any, x: Tensor, dim: int, outer: int, num_ranks: int, rank: int) -> Tensor:
        context.cut = dim, outer, num_ranks
        return part(x, dim, num_ranks, rank, outer)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        dim, outer, num_ranks = context.cut
        return joined(ops.all_gather(gradient, num_ranks, dim), dim, outer, num_ranks), None, None, None, None


class Gather(torch.autograd.Function):
    """Makes a cut tensor whole; `is_summed`: its readers are cut, and each rank has a part of the gradient's sum."""

    @staticmethod
    def forward(context: Any, x: Tensor, dim: int, outer: int, num_ranks: int, rank: int, is_summed: bool) -> Tensor:
        context.cut = dim, outer, num_ranks, rank, is_summed
        return joined(ops.all_gather(x, num_ranks, dim), dim, outer, num_ranks)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        dim, outer, num_ranks, rank, is_summed = context.cut
        if is_summed:
            size = gradient.shape[dim]
            if outer > 1:  # the parts of a rank behind each other
                apart = gradient.unflatten(dim, (outer, num_ranks, size // (outer * num_ranks)))
                gradient = apart.transpose(dim, dim + 1).flatten(dim, dim + 2)
            return ops.reduce_scatter(gradient, num_ranks, dim), None, None, None, None, None
        return part(gradient, dim, num_ranks, rank, outer), None, None, None, None, None


class Scatter(torch.autograd.Function):
    """Sums up the partial results of all ranks, and keeps this rank's part of the sum."""

    @staticmethod
    def forward(context: Any, x: Tensor, dim: int, num_ranks: int) -> Tensor:
        context.cut = num_ranks, dim
        result: Tensor = ops.reduce_scatter(x, num_ranks, dim)
        return result

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ops.all_gather(gradient, *context.cut), None, None


class Shuffle(torch.autograd.Function):
    """Sends an equal part of the rows to each rank, and gets as many from each; ranks are `stride` apart."""

    @staticmethod
    def forward(context: Any, x: Tensor, num_ranks: int, stride: int = 1) -> Tensor:
        context.among = num_ranks, stride
        result: Tensor = ops.all_to_all(x, *context.among)
        return result

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ops.all_to_all(gradient, *context.among), None, None


class Repeated(torch.autograd.Function):
    """Hands a weight on of which `num_parts` differ among the ranks; the gradients of equal ones are summed."""

    @staticmethod
    def forward(context: Any, x: Tensor, num_parts: int, num_ranks: int, rank: int) -> Tensor:
        context.cut = num_parts, num_ranks, rank * num_parts // num_ranks
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        num_parts, num_ranks, own = context.cut
        parts = gradient.new_zeros((num_parts, *gradient.shape))
        parts[own].copy_(gradient)
        return ops.all_reduce(parts, num_ranks)[own], None, None, None
