"""Routines of the ops of an exchange between replicas.

An exchange works in a buffer, which the first op that comes makes and the last one drops:

    gradients  --ready--> buffer --hops, in place--> buffer --done--> what updates read
    weights    --ready--> buffer --hops, in place--> buffer --done--> the same weights
    parameters --ready--> buffer --hops, in place--> buffer --done--> memory for a block

Buffers and weights on their way are held beside the tensors of the graph, under numbers below 0. What is sent is a view
of the buffer. Devices of one process read it there, which is safe: a chunk is written again only by the copy of its
sum, and every replica that read it has then added it.
"""

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

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
Slices = Mapping[int, slice]
"""Elements of a buffer by tensor."""


@dataclass(frozen=True, slots=True)
class MadeRoutine:
    """An op that no capture has; it has no constants that change."""

    def set_keyword(self, key: str, value: Any) -> None:
        """Changes nothing."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """The buffer of one exchange of a replica."""

    number: int  # that it is held by
    cut: Cut
    dtype: torch.dtype  # uint8 for weights of several types, whose pieces are counted in bytes then
    device: torch.device | None = None  # None: the CPU

    def on(self, device: torch.device | None) -> "Buffer":
        """Returns the buffer of a device."""
        return replace(self, device=device)

    def of(self, held: Held) -> Tensor:
        """Returns the buffer; makes it for the first op that comes: a gather's chunk may be here before `ready`."""
        if self.number not in held:
            held[self.number] = torch.empty(self.cut.num_elements, dtype=self.dtype, device=self.device)
        buffer: Tensor = held[self.number]
        return buffer

    def items(self, elements: Tensor) -> Tensor:
        """Returns a row of elements as items of the buffer: a view."""
        return elements if elements.dtype == self.dtype else elements.view(self.dtype)


@dataclass(frozen=True, slots=True)
class Hop(MadeRoutine):
    """Takes a chunk from the replica before in the ring, and has it ready for the next one."""

    buffer: Buffer
    taken: tuple[int, slice] | None  # the tensor that comes, and the elements that it is added to or copied to
    is_sum: bool
    sent: Slices

    def run(self, held: Held, private: Held, seed: int = 0) -> dict[int, Any]:
        """Adds or copies the chunk."""
        buffer = self.buffer.of(held)
        if self.taken is not None:
            tensor, where = self.taken
            chunk = buffer[where]
            if self.is_sum:
                chunk.add_(held[tensor])
            else:
                chunk.copy_(held[tensor])
        return {tensor: buffer[where] for tensor, where in self.sent.items()}


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

    def row(self, content: Tensor) -> Tensor:
        """Returns the elements in the order of memory; a view if they are dense."""
        return memory_order(content if self.read is None else self.read.of(content), self.layout)


@dataclass(frozen=True, slots=True)
class AllReduceReady(MadeRoutine):
    """Copies the gradients of a bucket together. Updates read the buffer from then on, so the gradients are freed."""

    buffer: Buffer
    members: Sequence[Member]
    sent: Slices

    def run(self, held: Held, private: Held, seed: int = 0) -> dict[int, Any]:
        """Packs the bucket."""
        buffer, results = self.buffer.of(held), dict[int, Any]()
        for number, member in enumerate(self.members):
            there = _shaped(self.buffer.cut.whole(buffer, number), member.layout)
            results[member.tensor] = there.copy_(held[member.tensor])
        return results | {tensor: buffer[where] for tensor, where in self.sent.items()}


def _shaped(row: Tensor, layout: StridedLayout) -> Tensor:
    """Returns a row of elements with the sizes of `layout`, and with its strides where it is dense."""
    if is_dense(layout):
        return row.as_strided(layout.size, layout.stride)
    return row.view(layout.size)


@dataclass(frozen=True, slots=True)
class AllReduceDone(MadeRoutine):
    """Ends an all-reduce: gradients are in the buffer, or outside of it where that is no place for them."""

    buffer: Buffer
    members: Sequence[Member]
    is_overwritten: bool  # updates change gradients, and the next replica of the ring may still read the buffer

    def run(self, held: Held, private: Held, seed: int = 0) -> dict[int, Any]:
        """Drops the buffer."""
        del held[self.buffer.number]
        contents = {member.tensor: as_recorded(held[member.tensor], member.layout) for member in self.members}
        return {tensor: content.clone() for tensor, content in contents.items()} if self.is_overwritten else contents


@dataclass(frozen=True, slots=True)
class ScatterReady(MadeRoutine):
    """Begins a reduce-scatter of the gradients of a bucket."""

    buffer: Buffer
    members: Sequence[Member]
    sent: Slices

    def run(self, held: Held, private: Held, seed: int = 0) -> dict[int, Any]:
        """Packs the bucket."""
        buffer = self.buffer.of(held)
        for number, member in enumerate(self.members):
            self.buffer.cut.pack(buffer, number, member.row(held[member.tensor]))
        return {tensor: buffer[where] for tensor, where in self.sent.items()}


@dataclass(frozen=True, slots=True)
class ScatterDone(MadeRoutine):
    """Ends a reduce-scatter: of each gradient, the piece that this replica has the sum of."""

    buffer: Buffer
    results: Slices

    def run(self, held: Held, private: Held, seed: int = 0) -> dict[int, Any]:
        """Copies the pieces, and drops the buffer."""
        buffer = held.pop(self.buffer.number)
        return {tensor: buffer[where].clone() for tensor, where in self.results.items()}


@dataclass(frozen=True, slots=True)
class WeightsReady(MadeRoutine):
    """Begins an all-gather of updated weights, of which each replica has updated a piece."""

    buffer: Buffer
    weights: Sequence[Member]  # under the numbers that updates hold them by
    own: int  # the chunk
    sent: Slices

    def run(self, held: Held, private: Held, seed: int = 0) -> dict[int, Any]:
        """Copies one's own pieces together."""
        buffer, cut = self.buffer.of(held), self.buffer.cut
        for number, weight in enumerate(self.weights):
            first, last, place = cut.piece(number, self.own)
            buffer[place : place + last - first] = self.buffer.items(weight.row(held[weight.tensor]))[first:last]
        return {tensor: buffer[where] for tensor, where in self.sent.items()}


@dataclass(frozen=True, slots=True)
class WeightsDone(MadeRoutine):
    """Ends an all-gather of updated weights."""

    buffer: Buffer
    weights: Sequence[Member]

    def run(self, held: Held, private: Held, seed: int = 0) -> dict[int, Any]:
        """Copies all pieces into the weights."""
        buffer = held.pop(self.buffer.number)
        for number, weight in enumerate(self.weights):
            self.buffer.cut.unpack(buffer, number, self.buffer.items(weight.row(held.pop(weight.tensor))))
        return {}


@dataclass(frozen=True, slots=True)
class ParametersReady(MadeRoutine):
    """Begins an all-gather of parameters for a block; its users wait for the last op of the exchange."""

    buffer: Buffer
    memory: int  # the number that whole parameters are held by until the end
    parameters: Sequence[Member]  # tensors of pieces; the layouts of whole parameters
    own: int  # the chunk
    sent: Slices
    results: Mapping[int, tuple[int, StridedLayout | None]]  # by tensor: the member, and which part of it

    def run(self, held: Held, private: Held, seed: int = 0) -> dict[int, Any]:
        """Copies one's own pieces together, and reserves memory for whole parameters."""
        buffer, cut = self.buffer.of(held), self.buffer.cut
        for number, parameter in enumerate(self.parameters):
            first, last, place = cut.piece(number, self.own)
            buffer[place : place + last - first] = self.buffer.items(held[parameter.tensor])
        memory = [empty(parameter.layout, buffer.device) for parameter in self.parameters]
        made = {
            tensor: view_of(memory[member], self.parameters[member].layout, part)
            for tensor, (member, part) in self.results.items()
        }
        return {self.memory: memory, **made} | {tensor: buffer[where] for tensor, where in self.sent.items()}


@dataclass(frozen=True, slots=True)
class ParametersDone(MadeRoutine):
    """Ends an all-gather of parameters."""

    buffer: Buffer
    memory: int
    parameters: Sequence[Member]
    results: Mapping[int, tuple[int, StridedLayout | None]]  # as in `ParametersReady`

    def run(self, held: Held, private: Held, seed: int = 0) -> dict[int, Any]:
        """Copies all pieces into the parameters."""
        buffer, memory = held.pop(self.buffer.number), held.pop(self.memory)
        for number, parameter in enumerate(self.parameters):
            self.buffer.cut.unpack(buffer, number, self.buffer.items(parameter.row(memory[number])))
        return {
            tensor: view_of(memory[member], self.parameters[member].layout, part)
            for tensor, (member, part) in self.results.items()
        }
