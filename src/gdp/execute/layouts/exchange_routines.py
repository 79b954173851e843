"""Routines of the ops of an exchange between replicas.

Nothing is packed: an exchange works on rows of elements where they lie, by chunk. A hop adds the row of another replica
to one's own, or takes it in its place:

    gradients  --ready--> rows --hops--> rows --done--> what updates read: rows, of whichever replica has the sum
    weights    --ready--> rows --hops--> rows --done--> copied into the weights
    parameters --ready--> rows --hops--> rows --done--> copied into memory for a block

Rows and weights on their way are held beside the tensors of the graph, under numbers below 0. Devices of one process
read rows in each other's memory, which is safe:

- the sum of a chunk is made in the memory of one replica, and a gradient that other ops read is copied first;
- what a replica has sent is written again only when its sum has come back, and then all have added it;
- updated weights are written again in the next step; gathered parameters might be updated before all have copied them,
  so they are sent as a copy.
"""

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from gdp.execute.exchanged_rows import Chunk, ExchangedRows
from gdp.execute.layouts.cut import Cut
from gdp.models.pytorch.strides import (
    StridedLayout,
    as_recorded,
    empty,
    is_dense,
    memory_order,
    part_view,
    view_of,
)

Held = MutableMapping[int, Any]
Sent = Mapping[int, Sequence[int]]
"""Numbers of chunks by tensor."""


@dataclass(frozen=True, slots=True)
class MadeRoutine:
    """An op that no capture has; it has no constants that change."""

    def set_keyword(self, key: str, value: Any) -> None:
        """Changes nothing."""


@dataclass(slots=True, eq=False)
class RowProgress:
    """An exchange of a replica under way."""

    chunks: list[Chunk]  # where the elements of each chunk are now
    rows: list[Tensor] = field(default_factory=list)  # [members] one's own memory


@dataclass(frozen=True, slots=True)
class RowExchange:
    """One exchange of a replica."""

    number: int  # that its progress is held by
    cut: Cut
    dtype: torch.dtype  # uint8 for weights of several types, whose pieces are counted in bytes then
    device: torch.device | None = None  # None: the CPU

    def on(self, device: torch.device | None) -> "RowExchange":
        """Returns the exchange of a device."""
        return replace(self, device=device)

    def progress(self, held: Held) -> RowProgress:
        """Returns the progress, from the first op that comes: a gather's chunk may be here before `ready`."""
        if self.number not in held:
            held[self.number] = RowProgress([()] * self.cut.num_chunks)
        progress: RowProgress = held[self.number]
        return progress

    def begin(self, held: Held, rows: Sequence[Tensor], chunks: Sequence[int]) -> RowProgress:
        """Returns the progress after one's own `chunks` of `rows` [members] have joined."""
        progress = self.progress(held)
        progress.rows = list(rows)
        for number in chunks:
            progress.chunks[number] = self.cut.chunk(number, rows)
        return progress

    def sent(self, progress: RowProgress, sent: Sent) -> dict[int, ExchangedRows | Tensor]:
        """Returns what goes to others, by tensor; from a GPU, whose copies are of tensors, as one."""
        found: dict[int, ExchangedRows | Tensor] = {}
        for tensor, numbers in sent.items():
            chunks = tuple(progress.chunks[number] for number in numbers)
            rows = ExchangedRows(chunks, self.cut.chunk_elements, self.dtype, self.device)
            found[tensor] = rows if self.device is None else rows.joined()
        return found

    def copy_chunks(self, progress: RowProgress, own: int | None = None) -> None:
        """Copies all chunks but `own` into one's own rows."""
        theirs = [number for number in range(self.cut.num_chunks) if number != own]
        targets = [row for number in theirs for row in self.cut.chunk(number, progress.rows)]
        if targets:
            torch._foreach_copy_(targets, [row for number in theirs for row in progress.chunks[number]])

    def items(self, elements: Tensor) -> Tensor:
        """Returns a row of elements as items of the exchange: a view."""
        return elements if elements.dtype == self.dtype else elements.view(self.dtype)


@dataclass(frozen=True, slots=True)
class Hop(MadeRoutine):
    """Takes a chunk from the replica before in the ring, and has it ready for the next one."""

    exchange: RowExchange
    taken: tuple[int, Sequence[int]] | None  # the tensor that comes, and its chunks
    is_sum: bool
    sent: Sent

    def run(self, held: Held, private: Held, seed: int = 0) -> dict[int, Any]:
        """Adds the chunk to one's own, or takes it in its place."""
        progress = self.exchange.progress(held)
        if self.taken is None:
            return {**self.exchange.sent(progress, self.sent)}
        tensor, numbers = self.taken
        content = held[tensor]
        came = content.chunks if isinstance(content, ExchangedRows) else self.exchange.cut.split(content, numbers)
        for number, chunk in zip(numbers, came, strict=True):
            if not self.is_sum:
                progress.chunks[number] = chunk
            elif chunk:
                torch._foreach_add_(progress.chunks[number], chunk)
        if not self.is_sum and all(sent == numbers for sent in self.sent.values()):
            return dict.fromkeys(self.sent, content)
        return {**self.exchange.sent(progress, self.sent)}


@dataclass(frozen=True, slots=True)
class GradientView:
    """The view of a gradient tensor that an update reads."""

    made: StridedLayout
    part: StridedLayout | None  # the part of its value that the tensor is; None: all
    view: StridedLayout | None

    def of(self, content: Tensor) -> Tensor:
        """Returns the view of the content of the tensor."""
        if self.part is None:
            return view_of(content, self.made, self.view)
        return part_view(content, self.part, self.part if self.view is None else self.view)


@dataclass(frozen=True, slots=True)
class Member:
    """A gradient, weight or parameter of an exchange: the number it is held by, and its layout in memory."""

    tensor: int
    layout: StridedLayout
    read: GradientView | None = None  # of a gradient, where updates read a piece of it; `layout` is the weight's then
    is_alone: bool = False  # of a gradient: nothing else reads its memory

    def row(self, content: Tensor) -> Tensor:
        """Returns the elements in the order of memory; a view if they are dense."""
        return memory_order(content if self.read is None else self.read.of(content), self.layout)

    def own_row(self, content: Tensor) -> Tensor:
        """Returns the elements in the order of memory, in memory that sums may be made in."""
        row = self.row(content)
        return row if self.is_alone and row.is_contiguous() else row.clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True, slots=True)
class SumReady(MadeRoutine):
    """Begins the sum of the gradients of a bucket, an all-reduce or a reduce-scatter."""

    exchange: RowExchange
    members: Sequence[Member]
    sent: Sent

    def run(self, held: Held, private: Held, seed: int = 0) -> dict[int, Any]:
        """Lists the rows."""
        rows = [member.own_row(held[member.tensor]) for member in self.members]
        progress = self.exchange.begin(held, rows, range(self.exchange.cut.num_chunks))
        return {**self.exchange.sent(progress, self.sent)}


def _shaped(row: Tensor, layout: StridedLayout) -> Tensor:
    """Returns a row of elements with the sizes of `layout`, and with its strides where it is dense."""
    if is_dense(layout):
        return row.as_strided(layout.size, layout.stride)
    return row.view(layout.size)


@dataclass(frozen=True, slots=True)
class AllReduceDone(MadeRoutine):
    """Ends an all-reduce: updates read a gradient where its sum was made, or in one's own memory, if that is in two
    places.
    """

    exchange: RowExchange
    members: Sequence[Member]
    own: int  # the chunk
    is_overwritten: bool  # updates change gradients, and other replicas may still read the sum

    def run(self, held: Held, private: Held, seed: int = 0) -> dict[int, Any]:
        """Finds the sums."""
        progress, found = held.pop(self.exchange.number), dict[int, Any]()
        for number, member in enumerate(self.members):
            content = as_recorded(_shaped(self._row(number, progress), member.layout), member.layout)
            found[member.tensor] = content.clone() if self.is_overwritten else content
        return found

    def _row(self, number: int, progress: RowProgress) -> Tensor:
        pieces = self.exchange.cut.places[number]
        if len(pieces) == 1:
            chunk, place, _, _ = pieces[0]
            return progress.chunks[chunk][place]
        row = progress.rows[number]
        for chunk, place, first, last in pieces:
            if chunk != self.own:  # the sum of which is there
                row[first:last].copy_(progress.chunks[chunk][place])
        return row


@dataclass(frozen=True, slots=True)
class ScatterDone(MadeRoutine):
    """Ends a reduce-scatter: of each gradient, the piece that this replica has the sum of."""

    exchange: RowExchange
    results: Mapping[int, tuple[int, int, int]]  # by tensor: the member, its first element, the one behind its last
    is_freed: bool  # the rest of a gradient is not needed any more

    def run(self, held: Held, private: Held, seed: int = 0) -> dict[int, Any]:
        """Finds the pieces, which are in one's own memory."""
        progress, found = held.pop(self.exchange.number), dict[int, Any]()
        for tensor, (member, first, last) in self.results.items():
            row = progress.rows[member]
            piece = row[first:last]
            found[tensor] = piece.clone() if self.is_freed and len(piece) < len(row) else piece
        return found


@dataclass(frozen=True, slots=True)
class WeightsReady(MadeRoutine):
    """Begins an all-gather of updated weights, of which each replica has updated a piece."""

    exchange: RowExchange
    weights: Sequence[Member]  # under the numbers that updates hold them by
    own: int  # the chunk
    sent: Sent

    def run(self, held: Held, private: Held, seed: int = 0) -> dict[int, Any]:
        """Lists one's own pieces."""
        rows = [self.exchange.items(weight.row(held.pop(weight.tensor))) for weight in self.weights]
        progress = self.exchange.begin(held, rows, [self.own])
        return {**self.exchange.sent(progress, self.sent)}


@dataclass(frozen=True, slots=True)
class WeightsDone(MadeRoutine):
    """Ends an all-gather of updated weights."""

    exchange: RowExchange
    own: int  # the chunk

    def run(self, held: Held, private: Held, seed: int = 0) -> dict[int, Any]:
        """Copies the pieces of others into the weights."""
        self.exchange.copy_chunks(held.pop(self.exchange.number), self.own)
        return {}


@dataclass(frozen=True, slots=True)
class ParametersReady(MadeRoutine):
    """Begins an all-gather of parameters for a block; its users wait for the last op of the exchange."""

    exchange: RowExchange
    memory: int  # the number that whole parameters are held by until the end
    parameters: Sequence[Member]  # tensors of pieces; the layouts of whole parameters
    own: int  # the chunk
    sent: Sent
    results: Mapping[int, tuple[int, StridedLayout | None]]  # by tensor: the member, and which part of it

    def run(self, held: Held, private: Held, seed: int = 0) -> dict[int, Any]:
        """Copies one's own pieces together, and reserves memory for whole parameters."""
        exchange, device = self.exchange, self.exchange.device
        memory = [empty(parameter.layout, device) for parameter in self.parameters]
        rows = [parameter.row(whole) for parameter, whole in zip(self.parameters, memory, strict=True)]
        progress = exchange.begin(held, [exchange.items(row) for row in rows], [])
        pieces = [exchange.items(held[parameter.tensor]) for parameter in self.parameters]
        (progress.chunks[self.own],) = exchange.cut.split(torch.cat(pieces), [self.own])
        made = {
            tensor: view_of(memory[member], self.parameters[member].layout, part)
            for tensor, (member, part) in self.results.items()
        }
        return {self.memory: memory, **made, **exchange.sent(progress, self.sent)}


@dataclass(frozen=True, slots=True)
class ParametersDone(MadeRoutine):
    """Ends an all-gather of parameters."""

    exchange: RowExchange
    memory: int
    parameters: Sequence[Member]
    results: Mapping[int, tuple[int, StridedLayout | None]]  # as in `ParametersReady`

    def run(self, held: Held, private: Held, seed: int = 0) -> dict[int, Any]:
        """Copies all pieces into the parameters."""
        memory = held.pop(self.memory)
        self.exchange.copy_chunks(held.pop(self.exchange.number))
        return {
            tensor: view_of(memory[member], self.parameters[member].layout, part)
            for tensor, (member, part) in self.results.items()
        }
