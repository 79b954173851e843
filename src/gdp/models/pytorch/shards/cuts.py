"""Cut tensors: a rank's part of a whole one, said by an attribute of the tensor."""

# mypy: disable-error-code="no-any-return,no-untyped-call"

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

ATTRIBUTE = "gdp_cut"
OUTER = "gdp_outer_cut"  # in its place: of tokens over ranks whose parts are cut again
STORED = "gdp_stored"  # of a parameter: its cut, of experts too, with which a rank computes as with all of them
OUTPUT, TOKENS_OF = "output.", "tokens of "  # begin the names of outputs, and of tokens of them, among cuts
PARTIAL = -1
_PIECE = "\n"  # in a source: between a path, and the first and the number of columns
SEQUENCE = "tokens"
"""The source of a cut of tokens, in place of weights."""
_attributes = [ATTRIBUTE]  # the one that is meant last


@dataclass(frozen=True, slots=True)
class AxisCut:
    """The whole tensor that a rank has a part of.

    Dimension `dim` of `shape` is [outer, cut, inner]: every of its `outer` pieces is cut in `num_parts`. Segments are
    pieces of unequal sizes, in place of `outer`, or in `counts` of parts each, as fewer heads of keys than of queries.
    With `dim` PARTIAL the ranks have summands of a tensor of that shape. With one part each rank has all of it for cut
    work, and a summand of its gradient; `dim` then says nothing.
    """

    shape: tuple[int, ...]
    dim: int
    num_parts: int
    outer: int = 1
    segments: tuple[int, ...] = ()
    sources: frozenset[str] = frozenset()  # paths of the weights whose cut it comes from, or `piece_of` them
    again: "AxisCut | None" = None  # of each part over the ranks that share it, of experts
    counts: tuple[int, ...] = ()  # of parts of each segment; (): num_parts

    @property
    def is_partial(self) -> bool:
        """True for summands of a tensor."""
        return self.dim == PARTIAL

    @property
    def before(self) -> int:
        """The number of pieces, of the whole tensor in the order of its elements."""
        return math.prod(self.shape[: self.dim]) * self.outer

    def part_of(self, whole: Tensor, rank: int, num_ranks: int) -> Tensor:
        """Returns the part of a whole tensor that a rank has."""
        own, among = divmod(rank, num_ranks // self.num_parts)
        local = part(whole, self.dim, self.num_parts, own, self.outer, self.segments, self.counts)
        return local if self.again is None else self.again.part_of(local, among, num_ranks // self.num_parts)

    def whole_of(self, parts: Sequence[Tensor]) -> Tensor:
        """Returns the whole tensor that the ranks have these parts of."""
        sizes, copies = segments_of(self), len(parts) // self.num_parts
        if self.again is not None:
            parts = [self.again.whole_of(parts[at : at + copies]) for at in range(0, len(parts), copies)]
            copies = 1
        pieces = zip(*(tensor.split(local_sizes(self), self.dim) for tensor in parts[::copies]), strict=True)
        counts = self.counts or (self.num_parts,) * len(sizes)
        wholes = [
            torch.cat(of_ranks[:: self.num_parts // count], self.dim).narrow(self.dim, 0, size)
            for size, count, of_ranks in zip(sizes, counts, pieces, strict=True)
        ]
        return torch.cat(wholes, self.dim)


def cut_of(tensor: Any) -> AxisCut | None:
    """Returns the whole that a tensor is a part of; None for a whole one."""
    return getattr(tensor, _attributes[-1], None)


def mark(tensor: Tensor, cut: AxisCut | None) -> Tensor:
    """Says of `tensor` that it is a part, in place."""
    setattr(tensor, _attributes[-1], cut)
    return tensor


@contextlib.contextmanager
def cuts_by(attribute: str) -> Iterator[None]:
    """Has cuts inside be those that this attribute of tensors says."""
    _attributes.append(attribute)
    try:
        yield
    finally:
        _attributes.pop()


def part(
    x: Tensor,
    dim: int,
    num_parts: int,
    own: int,
    outer: int = 1,
    segments: tuple[int, ...] = (),
    counts: tuple[int, ...] = (),
) -> Tensor:
    """Returns part `own` of a whole tensor; the last one is filled up with zeros if the size is no multiple."""
    if segments:
        pieces = zip(x.split(segments, dim), counts or (num_parts,) * len(segments), strict=True)
        return torch.cat([part(piece, dim, count, own * count // num_parts) for piece, count in pieces], dim)
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


def divided(*pieces: Sequence[int]) -> tuple[int, ...]:
    """Returns the sizes of the pieces between the ends of all pieces, of several divisions of a dimension."""
    ends = sorted({end for sizes in pieces for end in accumulate(sizes)})
    return tuple(end - start for start, end in pairwise([0, *ends]))


def segments_of(cut: AxisCut) -> tuple[int, ...]:
    """Returns the sizes of the pieces of a cut dimension, each of which is cut."""
    return cut.segments or (cut.shape[cut.dim] // cut.outer,) * cut.outer


def local_sizes(cut: AxisCut) -> list[int]:
    """Returns the sizes of what a rank has of each piece."""
    sizes = segments_of(cut)
    return [-(-size // count) for size, count in zip(sizes, cut.counts or (cut.num_parts,) * len(sizes), strict=True)]


def of_segments(
    shape: tuple[int, ...], dim: int, segments: tuple[int, ...], counts: tuple[int, ...], sources: frozenset[str]
) -> AxisCut:
    """Returns the cut of a tensor with these segments, each in as many parts; equal ones are counted."""
    if len(set(counts)) > 1:
        return AxisCut(shape, dim, max(counts), 1, segments, sources, None, counts)
    if len(set(segments)) == 1:
        return AxisCut(shape, dim, counts[0], len(segments), (), sources)
    return AxisCut(shape, dim, counts[0], 1, segments, sources)


def piece_of(path: str, first: int, size: int) -> str:
    """Returns the source of a cut that comes from some of the columns of a weight."""
    return _PIECE.join((path, str(first), str(size)))


def columns_of(source: str, size: int) -> tuple[str, int, int]:
    """Returns the path of a source, its first column, and their number: of a path alone all `size`."""
    path, *columns = source.split(_PIECE)
    first, count = map(int, columns or (0, size))
    return path, first, count


def path_of(source: str) -> str:
    """Returns the path of a source."""
    return source.partition(_PIECE)[0]


def whole_shape(tensor: Tensor) -> tuple[int, ...]:
    """Returns the shape of the whole that a tensor is a part of, or of a whole one."""
    cut = cut_of(tensor)
    return tuple(tensor.shape) if cut is None else cut.shape


def tensors_in(item: Any) -> Iterator[Tensor]:
    """Yields the tensors of nested arguments."""
    if isinstance(item, Tensor):
        yield item
    elif isinstance(item, (tuple, list)):
        for one in item:
            yield from tensors_in(one)
    elif isinstance(item, dict):
        yield from tensors_in(tuple(item.values()))


def cuts_in(item: Any) -> list[AxisCut]:
    """Returns the cuts of the tensors of nested arguments."""
    return [cut for tensor in tensors_in(item) if (cut := cut_of(tensor)) is not None]


def mapped(item: Any, change: Callable[[Tensor], Any]) -> Any:
    """Returns nested arguments with other tensors."""
    if isinstance(item, Tensor):
        return change(item)
    if type(item) in (tuple, list):
        return type(item)(mapped(one, change) for one in item)
    if type(item) is dict:
        return {key: mapped(one, change) for key, one in item.items()}
    return item


def without_content(func: Any, args: Any, kwargs: Any) -> Any:
    """Returns the result of a function of whole tensors, which have no content."""

    shapes = [whole_shape(tensor) for tensor in tensors_in((args, kwargs))]  # as the ranks inside have them

    def empty(tensor: Tensor) -> Tensor:
        return torch.empty(shapes.pop(0), dtype=tensor.dtype, device="meta")

    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
        args, kwargs = mapped((args, kwargs), empty)
        return func(*args, **kwargs)
