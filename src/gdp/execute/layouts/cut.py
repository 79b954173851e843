"""Cut: how the elements of several tensors are spread over replicas, and where each chunk lies in a buffer.

    joined   tensors one after the other, in equal chunks       | a a a a b | b b c c c |
    each     every tensor in equal pieces, a chunk of each      | a a b c c | a a b c . |
    spans    the pieces that replicas have anyway               | a a a b . | b b c c c |

`joined` keeps each tensor in one piece, `each` gives a replica the same piece of a parameter whatever it is exchanged
with. Rings over hosts cut chunks once more: a chunk of the inner rings is one of `outer` chunks after the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import ceil

from torch import Tensor

from gdp.parallel.rings import Rings

Span = tuple[int, int]
"""Elements from the first to behind the last."""


@dataclass(frozen=True, eq=False)
class Cut:
    """Pieces of tensors in a buffer with a chunk for each replica: those of a chunk lie one after the other."""

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

    @property
    def num_elements(self) -> int:
        """The elements of the buffer."""
        return self.num_chunks * self.chunk_elements

    def piece(self, member: int, chunk: int) -> tuple[int, int, int]:
        """Returns the elements of `member` in `chunk`, from the first to behind the last, and their place in the
        buffer.
        """
        return *self.spans[member][chunk], self._places[member][chunk]

    def whole(self, buffer: Tensor, member: int) -> Tensor:
        """Returns all elements of `member` in a buffer of joined tensors: a view."""
        spans = self.spans[member]
        size = spans[-1][1]
        place = next((self._places[member][chunk] for chunk, (first, last) in enumerate(spans) if last > first), 0)
        return buffer[place : place + size]

    def pack(self, buffer: Tensor, member: int, elements: Tensor) -> None:
        """Copies the `elements` of `member` into the buffer."""
        for chunk in range(self.num_chunks):
            first, last, place = self.piece(member, chunk)
            buffer[place : place + last - first].copy_(elements[first:last])

    def unpack(self, buffer: Tensor, member: int, elements: Tensor) -> None:
        """Copies `member` out of the buffer into `elements`."""
        for chunk in range(self.num_chunks):
            first, last, place = self.piece(member, chunk)
            elements[first:last].copy_(buffer[place : place + last - first])

    @cached_property
    def _places(self) -> tuple[tuple[int, ...], ...]:
        """[members, chunks] where each piece begins in the buffer."""
        ends = [chunk * self.chunk_elements for chunk in range(self.num_chunks)]
        places = []
        for spans in self.spans:
            places.append(tuple(ends))
            ends = [end + last - first for end, (first, last) in zip(ends, spans, strict=True)]
        return tuple(places)


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

    def elements(self, cut: Cut, replica: int, chunk: int, *, is_inside: bool) -> slice:
        """Returns the elements of the buffer that chunk `chunk` of a ring of a replica covers.

        `is_inside`: the ring is one inside a host, where there are rings over hosts as well.
        """
        size = cut.chunk_elements
        if is_inside:
            return slice(chunk * self.num_outer * size, (chunk + 1) * self.num_outer * size)
        first = self.owned_inner(replica) * self.num_outer if self.num_outer > 1 else 0
        return slice((first + chunk) * size, (first + chunk + 1) * size)
