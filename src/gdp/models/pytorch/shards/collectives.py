"""Exchanges among the ranks of a group, as operators that captures record, and their pairs of forward and backward.

    enter    forward: nothing                   backward: all-reduce      a whole tensor that cut work reads
    leave    forward: all-reduce                backward: nothing         partial sums become whole
    term     forward: one's share               backward: nothing         a whole tensor is added to partial sums
    own      forward: one's part                backward: all-gather      a whole tensor becomes cut
    gather   forward: all-gather                backward: one's part, or reduce-scatter where cut work reads the result
    scatter  forward: reduce-scatter            backward: all-gather      partial sums become cut
    exchange forward: all-to-all                backward: all-to-all      rows go to their experts' ranks

Fake tensors have one rank's size. A step is executed on what all ranks send; see `gdp.execute.layouts.sharded_program`.
Of ranks r that cut ops, each beside others c that have tokens of their own, rank r of c has the number c * count + r.
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


class Among(int):
    """The number of ranks of an exchange, whose own numbers are `stride` apart."""

    stride: int

    def __new__(cls, count: int, stride: int) -> "Among":
        """Makes the number."""
        made = super().__new__(cls, count)
        made.stride = stride
        return made


def members(rank: int, count: int, stride: int = 1) -> range:
    """Returns the ranks that `rank` exchanges with, and itself."""
    first = rank - rank // stride % count * stride
    return range(first, first + count * stride, stride)


def _same(x: Tensor, num_ranks: int, stride: int = 1) -> Tensor:
    return x.new_empty(x.shape)


def _gathered(x: Tensor, num_ranks: int, dim: int, stride: int = 1) -> Tensor:
    return x.new_empty([size * num_ranks if place == dim else size for place, size in enumerate(x.shape)])


def _scattered(x: Tensor, num_ranks: int, dim: int, stride: int = 1) -> Tensor:
    return x.new_empty([size // num_ranks if place == dim else size for place, size in enumerate(x.shape)])


for _name, _fake in (
    ("all_reduce", _same),
    ("all_reduce.max", _same),
    ("all_gather", _gathered),
    ("reduce_scatter", _scattered),
    ("all_to_all", _same),
    ("send", _same),
):
    _LIBRARY.define(f"{_name}(Tensor x, int num_ranks{', int dim' * (_fake is not _same)}, *, int stride=1) -> Tensor")
    torch.library.register_fake(f"collective::{_name}", _fake, lib=_LIBRARY)


def _exchange(op: Any, x: Tensor, num_ranks: int, *dim: int) -> Any:
    return op(x, num_ranks, *dim, stride=getattr(num_ranks, "stride", 1))


all_reduce, all_gather, reduce_scatter, all_to_all = (
    functools.partial(_exchange, getattr(ops, name))
    for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
)


def _sum_of(_rank: int, parts: Sequence[Tensor]) -> Tensor:
    return functools.reduce(torch.add, parts)


OF_ALL_RANKS: Mapping[Any, Callable[..., Tensor]] = {  # from a rank and what all ranks send, to what this one gets
    ops.all_reduce.default: _sum_of,
    ops.all_reduce.max: lambda rank, parts: functools.reduce(torch.maximum, parts),
    ops.all_gather.default: lambda rank, parts, dim: torch.cat(parts, dim),
    ops.reduce_scatter.default: lambda rank, parts, dim: _sum_of(rank, [x.chunk(len(parts), dim)[rank] for x in parts]),
    ops.all_to_all.default: lambda rank, parts: torch.cat([x.chunk(len(parts))[rank] for x in parts]),
    ops.send.default: lambda rank, parts: parts[rank - 1].clone(),
}


class Enter(torch.autograd.Function):
    """Hands a whole tensor to cut work; its gradient is the sum of those of all ranks."""

    @staticmethod
    def forward(context: Any, x: Tensor, num_ranks: int) -> Tensor:
        context.num_ranks = num_ranks
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_reduce(gradient, context.num_ranks), None


class Leave(torch.autograd.Function):
    """Sums up the partial results of all ranks."""

    @staticmethod
    def forward(context: Any, x: Tensor, num_ranks: int) -> Tensor:
        result: Tensor = all_reduce(x, num_ranks)
        return result

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Term(torch.autograd.Function):
    """Takes this rank's share of a whole term of a sum over ranks; each rank has the gradient of that sum."""

    @staticmethod
    def forward(context: Any, x: Tensor, num_ranks: int) -> Tensor:
        return x / num_ranks

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
        return joined(all_gather(gradient, num_ranks, dim), dim, outer, num_ranks), None, None, None, None


class Gather(torch.autograd.Function):
    """Makes a cut tensor whole; `is_summed`: its readers are cut, and each rank has a part of the gradient's sum."""

    @staticmethod
    def forward(context: Any, x: Tensor, dim: int, outer: int, num_ranks: int, rank: int, is_summed: bool) -> Tensor:
        context.cut = dim, outer, num_ranks, rank, is_summed
        return joined(all_gather(x, num_ranks, dim), dim, outer, num_ranks)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        dim, outer, num_ranks, rank, is_summed = context.cut
        if is_summed:
            size = gradient.shape[dim]
            if outer > 1:  # the parts of a rank behind each other
                apart = gradient.unflatten(dim, (outer, num_ranks, size // (outer * num_ranks)))
                gradient = apart.transpose(dim, dim + 1).flatten(dim, dim + 2)
            return reduce_scatter(gradient, num_ranks, dim), None, None, None, None, None
        return part(gradient, dim, num_ranks, rank, outer), None, None, None, None, None


class Scatter(torch.autograd.Function):
    """Sums up the partial results of all ranks, and keeps this rank's part of the sum."""

    @staticmethod
    def forward(context: Any, x: Tensor, dim: int, num_ranks: int) -> Tensor:
        context.cut = num_ranks, dim
        result: Tensor = reduce_scatter(x, num_ranks, dim)
        return result

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(gradient, *context.cut), None, None


class Shuffle(torch.autograd.Function):
    """Sends an equal part of the rows to each rank, and gets as many from each."""

    @staticmethod
    def forward(context: Any, x: Tensor, num_ranks: int) -> Tensor:
        context.num_ranks = num_ranks
        result: Tensor = all_to_all(x, num_ranks)
        return result

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_to_all(gradient, context.num_ranks), None


class Repeated(torch.autograd.Function):
    """Hands a weight on of which as many parts of each segment differ among the ranks as `counts` says; the gradients
    of equal ones are summed."""

    @staticmethod
    def forward(
        context: Any, x: Tensor, dim: int, sizes: list[int], counts: tuple[int, ...], num_ranks: int, rank: int
    ) -> Tensor:
        context.cut = dim, sizes, counts, num_ranks, rank
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        dim, sizes, counts, num_ranks, rank = context.cut
        pieces = []
        for piece, count in zip(gradient.split(sizes, dim), counts, strict=True):
            own = rank * count // num_ranks
            if count < num_ranks:
                parts = piece.new_zeros((count, *piece.shape))
                parts[own].copy_(piece)
                piece = all_reduce(parts, num_ranks)[own]
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim), None, None, None, None, None
