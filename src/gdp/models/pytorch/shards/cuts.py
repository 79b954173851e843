"""Cut tensors: a rank's part of a whole one, said by an attribute of the tensor."""

# mypy: disable-error-code="no-any-return,no-untyped-call"

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ATTRIBUTE = "gdp_cut"
PARTIAL = -1


@dataclass(frozen=True, slots=True)
class AxisCut:
    """The whole tensor that a rank has a part of.

    Dimension `dim` of `shape` is [outer, cut, inner]: every of its `outer` pieces is cut in `num_parts`. Segments are
    pieces of unequal sizes, in place of `outer`. With `dim` PARTIAL the ranks have summands of a tensor of that shape.
    """

    shape: tuple[int, ...]
    dim: int
    num_parts: int
    outer: int = 1
    segments: tuple[int, ...] = ()
    sources: frozenset[str] = frozenset()  # paths of the weights whose cut it comes from

    @property
    def is_partial(self) -> bool:
        """True for summands of a tensor."""
        return self.dim == PARTIAL

    @property
    def before(self) -> int:
        """The number of pieces, of the whole tensor in the order of its elements."""
        return math.prod(self.shape[: self.dim]) * self.outer


def cut_of(tensor: Any) -> AxisCut | None:
    """Returns the whole that a tensor is a part of; None for a whole one."""
    return getattr(tensor, ATTRIBUTE, None)


def mark(tensor: Tensor, cut: AxisCut | None) -> Tensor:
    """Says of `tensor` that it is a part, in place."""
    setattr(tensor, ATTRIBUTE, cut)
    return tensor


def part(x: Tensor, dim: int, num_parts: int, own: int, outer: int = 1, segments: tuple[int, ...] = ()) -> Tensor:
    """Returns part `own` of a whole tensor; the last one is filled up with zeros if the size is no multiple."""
    if segments:
        pieces = x.split(segments, dim)
        return torch.cat([part(piece, dim, num_parts, own) for piece in pieces], dim)
    size = x.shape[dim] // outer
    if size % num_parts:
        room = list(x.shape)
        room[dim] = -size % num_parts
        x = torch.cat([x, x.new_zeros(room)], dim)
        size = x.shape[dim]
    width = size // num_parts
    if outer == 1:
        return x.narrow(dim, own * width, width)
    return x.unflatten(dim, (outer, size)).narrow(dim + 1, own * width, width).flatten(dim, dim + 1)


def joined(x: Tensor, dim: int, outer: int, num_parts: int) -> Tensor:
    """Returns the parts of all ranks, one behind the other, in the order of the whole tensor."""
    if outer == 1:
        return x
    apart = x.unflatten(dim, (num_parts, outer, x.shape[dim] // (num_parts * outer)))
    return apart.transpose(dim, dim + 1).flatten(dim, dim + 2)


def segments_of(cut: AxisCut) -> tuple[int, ...]:
    """Returns the sizes of the pieces of a cut dimension, each of which is cut."""
    return cut.segments or (cut.shape[cut.dim] // cut.outer,) * cut.outer
