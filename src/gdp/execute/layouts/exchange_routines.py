"""Exchanges between replicas: what their ops do.

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
  so they are sent as a copy."""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gdp.execute.backends import Chunk, ExchangedRows
from gdp.execute.layouts.cut import Cut
from gdp.models.pytorch.strides import StridedLayout, as_recorded, empty, is_dense, memory_order, part_view, view_of

Held = MutableMapping[int, Any]
Device = torch.device | None  # None: the CPU
Sent = Mapping[int, Sequence[int]]  # numbers of chunks by tensor
Results = Mapping[int, tuple[int, Any]]
"""What the op makes by tensor: the member, and the part of it, a span of elements or a view."""


@dataclass(frozen=True, slots=True)
class MadeRoutine:
    """An op that no capture has; it has no constants that change."""

    function: Callable[[Held, Device], dict[int, Any]]  # of what is held, by number, and the device
    device: Device

    def run(self, held: Held, private: Held, seed: int = 0) -> dict[int, Any]:
        """Executes the op; see `Program.run`."""
        return self.function(held, self.device)

    def set_keyword(self, key: str, value: Any) -> None:
        """Changes nothing."""


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


@dataclass(slots=True, eq=False)
class RowProgress:
    """An exchange of a replica under way."""

    chunks: list[Chunk]  # where the elements of each chunk are now
    rows: list[Tensor] = field(default_factory=list)  # [members] one's own memory
    wholes: list[Tensor] = field(default_factory=list)  # [members] of gathered parameters


@dataclass(frozen=True)
class RowExchange:
    """One exchange of a replica and micro-batch, with the functions of its ops."""

    number: int  # that its progress is held by
    cut: Cut
    dtype: torch.dtype  # uint8 for weights of several types, whose pieces are counted in bytes then
    members: Sequence[Member]
    own: int  # the chunk whose sum ends here, or that is gathered from here

    def ready(self, sent: Sent, results: Results, held: Held, device: Device) -> dict[int, Any]:
        """Begins the exchange of the rows of gradients: an all-reduce or a reduce-scatter."""
        rows = [member.own_row(held[member.tensor]) for member in self.members]
        return self.sent(self.begin(held, rows, range(self.cut.num_chunks)), sent, device)

    def hop(
        self, taken: tuple[int, Sequence[int]] | None, is_sum: bool, sent: Sent, held: Held, device: Device
    ) -> dict[int, Any]:
        """Takes the tensor and chunks that come from the replica before in the ring, ready for the next one. Adds the
        chunks to one's own, or takes them in their place; without `taken` only sends."""
        progress = self.progress(held)
        if taken is None:
            return self.sent(progress, sent, device)
        tensor, numbers = taken
        content = held[tensor]
        came = content.chunks if isinstance(content, ExchangedRows) else self.cut.split(content, numbers)
        for number, chunk in zip(numbers, came, strict=True):
            if not is_sum:
                progress.chunks[number] = chunk
            elif chunk:
                torch._foreach_add_(progress.chunks[number], chunk)
        if not is_sum and all(chunks == numbers for chunks in sent.values()):
            return dict.fromkeys(sent, content)
        return self.sent(progress, sent, device)

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

    def sent(self, progress: RowProgress, sent: Sent, device: Device) -> dict[int, Any]:
        """Returns what goes to others, by tensor; from a GPU, whose copies are of tensors, as one."""
        found: dict[int, Any] = {}
        for tensor, numbers in sent.items():
            chunks = tuple(progress.chunks[number] for number in numbers)
            rows = ExchangedRows(chunks, self.cut.chunk_elements, self.dtype, device)
            found[tensor] = rows if device is None else rows.joined()
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


@dataclass(frozen=True)
class AllReduce(RowExchange):
    """Sums whole gradients."""

    is_overwritten: bool  # updates change gradients, and other replicas may still read the sum

    def done(self, results: Results, held: Held, device: Device) -> dict[int, Any]:
        """Returns gradients where their sum was made, or in one's own memory, if that is in two places."""
        progress, found = held.pop(self.number), dict[int, Any]()
        for number, member in enumerate(self.members):
            row, layout = self._row(number, progress), member.layout
            shaped = row.as_strided(layout.size, layout.stride) if is_dense(layout) else row.view(layout.size)
            content = as_recorded(shaped, layout)
            found[member.tensor] = content.clone() if self.is_overwritten else content
        return found

    def _row(self, number: int, progress: RowProgress) -> Tensor:
        pieces = self.cut.places[number]
        if len(pieces) == 1:
            chunk, place, _, _ = pieces[0]
            return progress.chunks[chunk][place]
        row = progress.rows[number]
        for chunk, place, first, last in pieces:
            if chunk != self.own:  # the sum of which is there
                row[first:last].copy_(progress.chunks[chunk][place])
        return row


@dataclass(frozen=True)
class ReduceScatter(RowExchange):
    """Sums the piece of each gradient that this replica owns."""

    is_in_place: bool  # pieces take the numbers of the gradients; else the last op makes tensors of them

    def done(self, results: Results, held: Held, device: Device) -> dict[int, Any]:
        """Finds the pieces, which are in one's own memory; `results` have their elements."""
        progress, found = held.pop(self.number), dict[int, Any]()
        for tensor, (member, (first, last)) in results.items():
            row = progress.rows[member]
            piece, is_freed = row[first:last], not self.is_in_place  # the rest of the gradient is not needed any more
            found[tensor] = piece.clone() if is_freed and len(piece) < len(row) else piece
        return found


@dataclass(frozen=True)
class WeightGather(RowExchange):
    """Gathers updated weights, of which each replica has updated a piece; held by the numbers of `kept_number`."""

    def ready(self, sent: Sent, results: Results, held: Held, device: Device) -> dict[int, Any]:
        """Lists one's own pieces."""
        rows = [self.items(weight.row(held.pop(weight.tensor))) for weight in self.members]
        return self.sent(self.begin(held, rows, [self.own]), sent, device)

    def done(self, results: Results, held: Held, device: Device) -> dict[int, Any]:
        """Copies the pieces of others into the weights."""
        self.copy_chunks(held.pop(self.number), self.own)
        return {}


@dataclass(frozen=True)
class ParameterGather(RowExchange):
    """Gathers parameters for a block; members have the tensors of pieces, and the layouts of whole parameters. The
    users of the whole parameters, tensors of the first op, wait for the last op."""

    def ready(self, sent: Sent, results: Results, held: Held, device: Device) -> dict[int, Any]:
        """Copies one's own pieces together, and reserves memory for whole parameters."""
        wholes = [empty(member.layout, device) for member in self.members]
        rows = [self.items(member.row(whole)) for member, whole in zip(self.members, wholes, strict=True)]
        progress = self.begin(held, rows, [])
        progress.wholes = wholes
        pieces = [self.items(held[member.tensor]) for member in self.members]
        (progress.chunks[self.own],) = self.cut.split(torch.cat(pieces), [self.own])
        return self._views(wholes, results) | self.sent(progress, sent, device)

    def done(self, results: Results, held: Held, device: Device) -> dict[int, Any]:
        """Copies all pieces into the parameters."""
        progress = held.pop(self.number)
        self.copy_chunks(progress)
        return self._views(progress.wholes, results)

    def _views(self, wholes: Sequence[Tensor], results: Results) -> dict[int, Any]:
        return {tensor: view_of(wholes[of], self.members[of].layout, part) for tensor, (of, part) in results.items()}
