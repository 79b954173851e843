"""Cut: how the elements of several tensors are spread over replicas, in a chunk for each of them.

    joined   tensors one after the other, in equal chunks       | a a a a b | b b c c c |
    each     every tensor in equal pieces, a chunk of each      | a a b c c | a a b c . |
    spans    the pieces that replicas have anyway               | a a a b . | b b c c c |

`joined` keeps each tensor in one piece, `each` gives a replica the same piece of a parameter whatever it is exchanged
with. Rings over hosts cut chunks once more: a chunk of the inner rings is one of `outer` chunks after the other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from math import ceil

import torch
from torch import Tensor

from gdp.execute.backends import Chunk
from gdp.models.pytorch.strides import StridedLayout
from gdp.parallel.rings import Rings

Span = tuple[int, int]  # elements from the first to behind the last


@dataclass(frozen=True, eq=False)
class Cut:
    """The pieces of tensors that chunks have, one after the other: a chunk for each replica."""

    spans: tuple[tuple[Span, ...], ...]  # [members, chunks] the elements of each tensor in each chunk

    @classmethod
    def joined(cls, sizes: Sequence[int], inner: int, outer: int = 1) -> "Cut":
        """Cuts tensors of `sizes` elements, laid one after the other, into `inner` times `outer` chunks."""
        chunk = ceil(ceil(sum(sizes) / inner) / outer)
        ends = [number * chunk for number in range(inner * outer + 1)]
        offsets = [0, *accumulate(sizes)]
        return cls(
            tuple(
                tuple((_within(begin - offset, size), _within(end - offset, size)) for begin, end in pairwise(ends))
                for offset, size in zip(offsets, sizes, strict=False)
            )
        )

    @classmethod
    def each(cls, sizes: Sequence[int], num_chunks: int) -> "Cut":
        """Cuts each tensor into `num_chunks` pieces, of which the last ones may be shorter or empty."""
        return cls(
            tuple(
                tuple(pairwise(_within(number * ceil(size / num_chunks), size) for number in range(num_chunks + 1)))
                for size in sizes
            )
        )

    @cached_property
    def chunk_elements(self) -> int:
        """The elements of a chunk; all are as long as the longest."""
        return max((sum(last - first for first, last in chunk) for chunk in zip(*self.spans, strict=True)), default=0)

    @property
    def num_chunks(self) -> int:
        """The number of replicas."""
        return len(self.spans[0])

    @cached_property
    def pieces(self) -> tuple[tuple[tuple[int, int, int], ...], ...]:
        """[chunks] the pieces with elements: the member, its first element, and the one behind its last."""
        return tuple(
            tuple((member, first, last) for member, (first, last) in enumerate(chunk) if last > first)
            for chunk in zip(*self.spans, strict=True)
        )

    @cached_property
    def places(self) -> tuple[tuple[tuple[int, int, int, int], ...], ...]:
        """[members] where its pieces with elements are: the chunk, the place in the chunk, and the elements."""
        found: list[list[tuple[int, int, int, int]]] = [[] for _ in self.spans]
        for chunk, pieces in enumerate(self.pieces):
            for place, (member, first, last) in enumerate(pieces):
                found[member].append((chunk, place, first, last))
        return tuple(map(tuple, found))

    def chunk(self, number: int, rows: Sequence[Tensor]) -> Chunk:
        """Returns a chunk of `rows` [members]: views."""
        return tuple(rows[member][first:last] for member, first, last in self.pieces[number])

    def split(self, joined: Tensor, chunks: Sequence[int]) -> list[Chunk]:
        """Returns `chunks` out of one tensor of them: views."""
        found = []
        for place, number in enumerate(chunks):
            sizes = [last - first for _, first, last in self.pieces[number]]
            begin = place * self.chunk_elements
            found.append(torch.split_with_sizes(joined[begin : begin + sum(sizes)], sizes) if sizes else ())
        return found


def _within(number: int, size: int) -> int:
    return min(max(number, 0), size)


@dataclass(frozen=True)
class RingPlaces:
    """The place of each replica [R] in the rings: in the inner ring, and in the outer one (0 where there is none)."""

    inner: tuple[int, ...]
    outer: tuple[int, ...]
    num_inner: int
    num_outer: int

    @classmethod
    def of(cls, rings: Rings) -> "RingPlaces":
        """Reads them off the rings; see `Rings.levels`."""
        inside = rings.levels[0]
        num_outer = inside.shape[0]
        places = {int(replica): (rank, host) for host, row in enumerate(inside) for rank, replica in enumerate(row)}
        inner, outer = zip(*(places[replica] for replica in range(len(places))), strict=True)
        return cls(inner, outer, inside.shape[1], num_outer)

    @property
    def num_replicas(self) -> int:
        """The number of replicas, and of chunks."""
        return len(self.inner)

    def owned_inner(self, replica: int) -> int:
        """Returns the inner chunk whose sum ends at a replica."""
        return (self.inner[replica] + 1) % self.num_inner

    def owned(self, replica: int) -> int:
        """Returns the chunk, counted through, whose sum ends at a replica."""
        return self.owned_inner(replica) * self.num_outer + (self.outer[replica] + 1) % self.num_outer

    def taken(self, replica: int, turn: int, *, is_sum: bool, is_inside: bool) -> range:
        """Returns the chunks of the bucket, counted through, that a replica takes at a hop of a ring. `turn` counts the
        hops of sums, or of copies, of the replica; `is_inside`: the ring is inside a host, beside rings over hosts."""
        is_inner = is_inside or self.num_outer == 1
        place, count = (self.inner, self.num_inner) if is_inner else (self.outer, self.num_outer)
        chunk = (place[replica] - turn - is_sum) % count  # a sum begins where the chunk is, a copy one place behind
        if is_inside:
            return range(chunk * self.num_outer, (chunk + 1) * self.num_outer)
        first = self.owned_inner(replica) * self.num_outer if self.num_outer > 1 else 0
        return range(first + chunk, first + chunk + 1)


@dataclass(frozen=True, slots=True)
class Pieces:
    """A tensor that is cut over replicas."""

    spans: dict[int, Span]  # the elements of each piece, by tensor
    layout: StridedLayout  # of the whole, which is dense

    def joined(self, held: Mapping[int, Tensor]) -> Tensor:
        """Returns the whole, on the CPU."""
        filled = sorted((span, tensor) for tensor, span in self.spans.items() if span[1] > span[0])
        row = torch.cat([held[tensor].to("cpu") for _, tensor in filled] or [torch.empty(0)])
        return row.as_strided(self.layout.size, self.layout.stride)


@dataclass(frozen=True, eq=False)
class Ownership:
    """The elements of weights that each replica updates."""

    places: RingPlaces
    _spans: dict[int, tuple[Span, ...]] = field(default_factory=dict)  # by weight, of each chunk

    def __contains__(self, weight: int) -> bool:
        return weight in self._spans

    def cut(self, weight: int, spans: tuple[Span, ...]) -> None:
        """Cuts a weight, unless it is cut already: all replicas cut alike."""
        self._spans.setdefault(weight, spans)

    def piece(self, weight: int, replica: int) -> Span:
        """Returns the elements of a weight that a replica owns."""
        return self._spans[weight][self.places.owned(replica)]

    def gathered(self, weights: Sequence[int], item_sizes: Sequence[int]) -> Cut:
        """Returns the cut of a buffer in which all pieces come together; items of each weight's elements."""
        return Cut(
            tuple(
                tuple((first * size, last * size) for first, last in self._spans[weight])
                for weight, size in zip(weights, item_sizes, strict=True)
            )
        )
