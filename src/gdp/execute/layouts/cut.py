"""Cut: how the elements of several tensors are spread over replicas, and where each chunk lies in a buffer.

    joined   tensors one after the other, in equal chunks       | a a a a b | b b c c c |
    each     every tensor in equal pieces, a chunk of each      | a a b c c | a a b c . |

`joined` keeps each tensor in one piece, `each` gives a replica the same piece of a parameter whatever it is exchanged
with. Rings over hosts cut chunks once more: a chunk of the inner rings is one of `outer` chunks after the other.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import ceil

from torch import Tensor

from gdp.parallel.rings import Rings


@dataclass(frozen=True)
class Cut:
    """Tensors of `sizes` elements over `inner` times `outer` replicas: in a buffer with a chunk for each replica."""

    sizes: tuple[int, ...]
    inner: int
    outer: int = 1
    is_each: bool = False

    @property
    def num_chunks(self) -> int:
        return self.inner * self.outer

    @cached_property
    def chunk_elements(self) -> int:
        if self.is_each:
            return sum(self._piece_sizes)
        return ceil(ceil(sum(self.sizes) / self.inner) / self.outer)

    @property
    def num_elements(self) -> int:
        """The elements of the buffer."""
        return self.num_chunks * self.chunk_elements

    def piece(self, member: int, chunk: int) -> tuple[int, int, int]:
        """Returns the elements of `member` in `chunk`, from the first to behind the last, and their place in the
        buffer.
        """
        size = self.sizes[member]
        if self.is_each:
            first = min(chunk * self._piece_sizes[member], size)
            last = min(first + self._piece_sizes[member], size)
            return first, last, chunk * self.chunk_elements + self._piece_offsets[member]
        begin, end = chunk * self.chunk_elements, (chunk + 1) * self.chunk_elements
        offset = self._offsets[member]
        first, last = (min(max(place - offset, 0), size) for place in (begin, end))
        return first, last, offset + first

    def whole(self, buffer: Tensor, member: int) -> Tensor:
        """Returns the elements of `member` in a buffer of joined tensors: a view."""
        assert not self.is_each, "its elements do not lie together"
        return buffer[self._offsets[member] : self._offsets[member] + self.sizes[member]]

    def pack(self, buffer: Tensor, member: int, elements: Tensor) -> None:
        """Copies the `elements` of `member` into the buffer."""
        if not self.is_each:
            self.whole(buffer, member).copy_(elements)
            return
        for chunk in range(self.num_chunks):
            first, last, place = self.piece(member, chunk)
            buffer[place : place + last - first].copy_(elements[first:last])

    def unpack(self, buffer: Tensor, member: int, elements: Tensor) -> None:
        """Copies `member` out of the buffer into `elements`."""
        if not self.is_each:
            elements.copy_(self.whole(buffer, member))
            return
        for chunk in range(self.num_chunks):
            first, last, place = self.piece(member, chunk)
            elements[first:last].copy_(buffer[place : place + last - first])

    @cached_property
    def _offsets(self) -> tuple[int, ...]:
        return (0, *accumulate(self.sizes))

    @cached_property
    def _piece_sizes(self) -> tuple[int, ...]:
        return tuple(-(-size // self.num_chunks) for size in self.sizes)

    @cached_property
    def _piece_offsets(self) -> tuple[int, ...]:
        return (0, *accumulate(self._piece_sizes))


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
