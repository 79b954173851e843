"""Exchanges among the ranks of a group, as operators that captures record, and their pairs of forward and backward.

    enter    forward: nothing                   backward: all-reduce      a whole tensor that cut work reads
    leave    forward: all-reduce                backward: nothing         partial sums become whole
    own      forward: one's part                backward: all-gather      a whole tensor becomes cut
    gather   forward: all-gather                backward: one's part, or reduce-scatter where cut work reads the result
    scatter  forward: reduce-scatter            backward: all-gather      partial sums become cut
    exchange forward: all-to-all                backward: all-to-all      rows go to their experts' ranks

Fake tensors need no process group. Real ones are exchanged over the group of `run_over`.
"""

# mypy: disable-error-code="no-any-return,no-untyped-call"

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from gdp.models.pytorch.shards.cuts import joined, part

ops = torch.ops.collective
_LIBRARY = torch.library.Library("collective", "DEF")
_GROUPS: list[Any] = []  # process groups of torch.distributed, the innermost last


@contextlib.contextmanager
def run_over(group: Any) -> Iterator[None]:
    """Exchanges real tensors over a process group of torch.distributed inside."""
    _GROUPS.append(group)
    try:
        yield
    finally:
        _GROUPS.pop()


def _group(num_ranks: int) -> Any:
    if not _GROUPS or torch.distributed.get_world_size(_GROUPS[-1]) != num_ranks:
        raise RuntimeError(f"a local program of {num_ranks} ranks runs over a process group of as many; see `run_over`")
    return _GROUPS[-1]


def _reduced(x: Tensor, num_ranks: int, kind: Any) -> Tensor:
    result = x.clone(memory_format=torch.contiguous_format)
    torch.distributed.all_reduce(result, kind, _group(num_ranks))
    return result


def _all_reduce(x: Tensor, num_ranks: int) -> Tensor:
    return _reduced(x, num_ranks, torch.distributed.ReduceOp.SUM)


def _all_reduce_max(x: Tensor, num_ranks: int) -> Tensor:
    return _reduced(x, num_ranks, torch.distributed.ReduceOp.MAX)


def _all_gather(x: Tensor, num_ranks: int, dim: int) -> Tensor:
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(num_ranks)]
    torch.distributed.all_gather(parts, x.contiguous(), _group(num_ranks))
    return torch.cat(parts, dim)


def _reduce_scatter(x: Tensor, num_ranks: int, dim: int) -> Tensor:
    rank = torch.distributed.get_rank(_group(num_ranks))
    return _all_reduce(x, num_ranks).chunk(num_ranks, dim)[rank].clone()  # gloo has no reduce-scatter


def _all_to_all(x: Tensor, num_ranks: int) -> Tensor:
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    torch.distributed.all_to_all_single(result, x.contiguous(), group=_group(num_ranks))
    return result


def _send(x: Tensor, num_ranks: int) -> Tensor:
    group, result = _group(num_ranks), torch.empty_like(x, memory_format=torch.contiguous_format)
    rank = torch.distributed.get_rank(group)
    after, before = (torch.distributed.get_global_rank(group, (rank + step) % num_ranks) for step in (1, -1))
    sent = torch.distributed.isend(x.contiguous(), after, group)
    torch.distributed.recv(result, before, group)
    if sent is not None:
        sent.wait()
    return result


def _same(x: Tensor, num_ranks: int) -> Tensor:
    return x.new_empty(x.shape)


def _gathered(x: Tensor, num_ranks: int, dim: int) -> Tensor:
    return x.new_empty([size * num_ranks if place == dim else size for place, size in enumerate(x.shape)])


def _scattered(x: Tensor, num_ranks: int, dim: int) -> Tensor:
    return x.new_empty([size // num_ranks if place == dim else size for place, size in enumerate(x.shape)])


for _name, _kernel, _fake in (
    ("all_reduce", _all_reduce, _same),
    ("all_reduce.max", _all_reduce_max, _same),
    ("all_gather", _all_gather, _gathered),
    ("reduce_scatter", _reduce_scatter, _scattered),
    ("all_to_all", _all_to_all, _same),
    ("send", _send, _same),
):
    _LIBRARY.define(f"{_name}(Tensor x, int num_ranks{', int dim' * (_fake is not _same)}) -> Tensor")
    _LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"collective::{_name}", _fake, lib=_LIBRARY)


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


class Exchange(torch.autograd.Function):
    """Sends an equal part of the rows to each rank, and gets as many from each."""

    @staticmethod
    def forward(context: Any, x: Tensor, num_ranks: int) -> Tensor:
        context.num_ranks = num_ranks
        result: Tensor = ops.all_to_all(x, num_ranks)
        return result

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ops.all_to_all(gradient, context.num_ranks), None


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
