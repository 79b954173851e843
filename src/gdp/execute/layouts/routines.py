"""Routines of the ops that a layout adds to a program: sums over micro-batches, and exchanges between replicas.

An exchange works in a buffer, which its first op makes and its last one drops:

    gradients --ready--> buffer --hops, in place--> buffer --done--> what updates read
    weights   --ready--> buffer --hops, in place--> buffer --done--> weights

Buffers and weights on their way are held beside the tensors of the graph, under numbers below 0. Hops are views of a
buffer: no chunk is written between being sent and being read by the next replica of the ring.
"""

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gdp.execute.layouts.cut import Cut
from gdp.models.pytorch.routine import leaves
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


@dataclass(frozen=True, slots=True)
class MadeRoutine:
    """An op that no capture has; it has no constants that change."""

    def set_keyword(self, key: str, value: Any) -> None:
        """Changes nothing."""


@dataclass(frozen=True, slots=True)
class Nothing(MadeRoutine):
    """Only waits: the end of a batch."""

    def run(self, held: Held, private: Held, seed: int = 0) -> dict[int, Any]:
        """Makes nothing."""
        return {}


@dataclass(frozen=True, slots=True)
class Shifted:
    """A routine of a micro-batch, whose random numbers are its own."""

    routine: Any
    offset: int  # of seeds

    def run(self, held: Held, private: Held, seed: int = 0) -> dict[int, Any]:
        """Executes the op; see `Program.run`."""
        answer: dict[int, Any] = self.routine.run(held, private, seed + self.offset)
        return answer

    def set_keyword(self, key: str, value: Any) -> None:
        """Changes a constant argument of the op."""
        self.routine.set_keyword(key, value)


@dataclass(frozen=True, slots=True)
class Sum(MadeRoutine):
    """Adds the gradient of one more micro-batch."""

    before: int
    gradient: int
    result: int
    is_in_place: bool  # `before` is a sum that nothing else reads

    def run(self, held: Held, private: Held, seed: int = 0) -> dict[int, Any]:
        """Adds."""
        before, gradient = held[self.before], held[self.gradient]
        if self.is_in_place:
            return {self.result: before.add_(gradient)}
        # as the gradient lies in memory: each may have come as a compact copy
        return {self.result: torch.add(before, gradient)}


@dataclass(frozen=True, slots=True)
class Hop(MadeRoutine):
    """Takes a chunk from the replica before in the ring, and has it ready for the next one.

    A gathered chunk may come before this replica has made its own: then its buffer is made here.
    """

    buffer: int
    cut: Cut
    dtype: torch.dtype
    taken: tuple[int, slice] | None  # the tensor that comes, and the elements that it is added to or copied to
    is_sum: bool
    sent: Mapping[int, slice]  # elements by tensor

    def run(self, held: Held, private: Held, seed: int = 0) -> dict[int, Any]:
        """Adds or copies the chunk."""
        if self.taken is None:
            buffer = held[self.buffer]
        else:
            tensor, where = self.taken
            buffer = _buffer_of(self, held, held[tensor].device)
            chunk = buffer[where]
            if self.is_sum:
                chunk.add_(held[tensor])
            else:
                chunk.copy_(held[tensor])
        return {self.buffer: buffer} | {tensor: buffer[where] for tensor, where in self.sent.items()}


def _buffer_of(op: "Hop | WeightsReady | ParametersReady", held: Held, device: torch.device) -> Tensor:
    """Returns the buffer of the exchange of `op`, which the first of its ops on a replica makes."""
    buffer: Tensor | None = held.get(op.buffer)
    return torch.empty(op.cut.num_elements, dtype=op.dtype, device=device) if buffer is None else buffer


@dataclass(frozen=True, slots=True)
class Member:
    """A gradient or weight of an exchange: the tensors that have it, and how its memory is read as one row.

    `read`: how an update sees a gradient (the layout of its value, of the part that the tensor is, and of the view);
    None: a weight, or a gradient that stays as it lies in memory. `layout`: of the weight, or of the gradient.
    """

    tensor: int
    layout: StridedLayout

    def row(self, content: Tensor) -> Tensor:
        """Returns the elements in the order of memory; a view if they are dense."""
        return memory_order(content, self.layout)


@dataclass(frozen=True, slots=True)
class SumReady(MadeRoutine):
    """Copies the gradients of a bucket together.

    All-reduce: updates are to read the buffer from then on, so the gradients are freed.
    """

    buffer: int
    cut: Cut
    dtype: torch.dtype
    members: Sequence[Member]
    reads: Sequence["GradientView | None"]  # how updates see each gradient; None: it is kept as it lies in memory
    sent: Mapping[int, slice]
    is_all_reduce: bool

    def run(self, held: Held, private: Held, seed: int = 0) -> dict[int, Any]:
        """Packs the bucket."""
        first = held[self.members[0].tensor]
        buffer = torch.empty(self.cut.num_elements, dtype=self.dtype, device=first.device)
        results: dict[int, Any] = {self.buffer: buffer}
        for number, (member, read) in enumerate(zip(self.members, self.reads, strict=True)):
            content = held[member.tensor]
            if read is not None:
                content = read.of(content)
            if self.is_all_reduce:
                there = shaped(self.cut.whole(buffer, number), member.layout)
                results[member.tensor] = there.copy_(content)
            else:
                self.cut.pack(buffer, number, member.row(content))
        return results | {tensor: buffer[where] for tensor, where in self.sent.items()}


@dataclass(frozen=True, slots=True)
class GradientView:
    """The view of a gradient tensor that an update reads."""

    made: StridedLayout
    part: StridedLayout | None  # what the tensor is of its value; None: all
    view: StridedLayout | None

    def of(self, content: Tensor) -> Tensor:
        """Returns the view of the content of the tensor."""
        if self.part is None:
            return view_of(content, self.made, self.view)
        return part_view(content, self.part, self.part if self.view is None else self.view)


def shaped(row: Tensor, layout: StridedLayout) -> Tensor:
    """Returns a row of elements with the sizes of `layout`, and with its strides where it is dense."""
    if is_dense(layout):
        return row.as_strided(layout.size, layout.stride)
    return row.view(layout.size)


@dataclass(frozen=True, slots=True)
class AllReduceDone(MadeRoutine):
    """Ends an all-reduce: gradients are in the buffer, or outside of it where that is no place for them."""

    buffer: int
    members: Sequence[Member]
    is_overwritten: bool  # updates change gradients, and the next replica of the ring may still read the buffer

    def run(self, held: Held, private: Held, seed: int = 0) -> dict[int, Any]:
        """Drops the buffer."""
        del held[self.buffer]
        contents = {member.tensor: as_recorded(held[member.tensor], member.layout) for member in self.members}
        return {tensor: content.clone() for tensor, content in contents.items()} if self.is_overwritten else contents


@dataclass(frozen=True, slots=True)
class ScatterDone(MadeRoutine):
    """Ends a reduce-scatter: of each gradient, the piece that this replica has the sum of."""

    buffer: int
    results: Mapping[int, slice]  # elements of the buffer by tensor

    def run(self, held: Held, private: Held, seed: int = 0) -> dict[int, Any]:
        """Copies the pieces, and drops the buffer."""
        buffer = held.pop(self.buffer)
        return {tensor: buffer[where].clone() for tensor, where in self.results.items()}


@dataclass(frozen=True, slots=True)
class WeightsReady(MadeRoutine):
    """Begins an all-gather of updated weights, of which each replica has updated a piece."""

    buffer: int
    cut: Cut
    dtype: torch.dtype
    weights: Sequence[Member]  # under the numbers that updates hold them by
    own: int  # the chunk
    sent: Mapping[int, slice]

    def run(self, held: Held, private: Held, seed: int = 0) -> dict[int, Any]:
        """Copies one's own pieces together."""
        buffer = _buffer_of(self, held, held[self.weights[0].tensor].device)
        for number, weight in enumerate(self.weights):
            first, last, place = self.cut.piece(number, self.own)
            buffer[place : place + last - first] = weight.row(held[weight.tensor])[first:last]
        return {self.buffer: buffer} | {tensor: buffer[where] for tensor, where in self.sent.items()}


@dataclass(frozen=True, slots=True)
class WeightsDone(MadeRoutine):
    """Ends an all-gather of updated weights."""

    buffer: int
    cut: Cut
    weights: Sequence[Member]

    def run(self, held: Held, private: Held, seed: int = 0) -> dict[int, Any]:
        """Copies all pieces into the weights."""
        buffer = held.pop(self.buffer)
        for number, weight in enumerate(self.weights):
            self.cut.unpack(buffer, number, weight.row(held.pop(weight.tensor)))
        return {}


@dataclass(frozen=True, slots=True)
class ParametersReady(MadeRoutine):
    """Begins an all-gather of parameters for a block; its users wait for the last op of the exchange."""

    buffer: int
    memory: int  # what the parameters are held by until the end
    cut: Cut
    dtype: torch.dtype
    parameters: Sequence[Member]  # tensors of pieces; the layouts of whole parameters
    own: int
    sent: Mapping[int, slice]
    results: Mapping[int, tuple[int, StridedLayout | None]]  # by tensor: the member, and which part of it

    def run(self, held: Held, private: Held, seed: int = 0) -> dict[int, Any]:
        """Copies one's own pieces together, and reserves memory for whole parameters."""
        device = held[self.parameters[0].tensor].device
        buffer = _buffer_of(self, held, device)
        for number, parameter in enumerate(self.parameters):
            first, last, place = self.cut.piece(number, self.own)
            buffer[place : place + last - first] = held[parameter.tensor]
        memory = [empty(parameter.layout, device) for parameter in self.parameters]
        made = {
            tensor: view_of(memory[member], self.parameters[member].layout, part)
            for tensor, (member, part) in self.results.items()
        }
        return {self.buffer: buffer, self.memory: memory, **made} | {
            tensor: buffer[where] for tensor, where in self.sent.items()
        }


@dataclass(frozen=True, slots=True)
class ParametersDone(MadeRoutine):
    """Ends an all-gather of parameters."""

    buffer: int
    memory: int
    cut: Cut
    parameters: Sequence[Member]
    results: Mapping[int, tuple[int, StridedLayout | None]]  # as in `ParametersReady`

    def run(self, held: Held, private: Held, seed: int = 0) -> dict[int, Any]:
        """Copies all pieces into the parameters."""
        buffer, memory = held.pop(self.buffer), held.pop(self.memory)
        for number, parameter in enumerate(self.parameters):
            self.cut.unpack(buffer, number, parameter.row(memory[number]))
        return {
            tensor: view_of(memory[member], self.parameters[member].layout, part)
            for tensor, (member, part) in self.results.items()
        }


class PieceUpdate:
    """An update of the piece of a parameter that a replica owns, by kernels that treat each element alone."""

    def __init__(self, update: "UpdateOfPiece", device: torch.device | None) -> None:
        from gdp.models.pytorch.replacements import function_for

        self._update, self._device = update, device
        self._calls = [(function_for(call.func, device), call.args, dict(call.kwargs), call) for call in update.calls]

    def run(self, held: Held, private: Held, seed: int = 0) -> dict[int, Any]:
        """Executes the update; see `Program.run`."""
        update = self._update
        first, last = update.piece
        weight = held[update.weight.tensor]
        row = weight if update.is_cut else update.weight.row(weight)[first:last]
        values = {update.weight_value: row, update.gradient_value: held[update.gradient]}
        if last > first:
            for value, layout in update.state.items():
                if value not in private:
                    private[value] = torch.zeros(layout.size and (last - first,), dtype=layout.dtype, device=row.device)
                    if value in update.copies:
                        private[value].copy_(row)
                values[value] = private[value]
            for function, args, kwargs, call in self._calls:
                result = function(*(_filled(item, values) for item in args), **_filled(kwargs, values))
                values |= {new: values[old] for old, new in call.writes}
                made = zip(call.outputs, leaves(result), strict=False)
                values |= {value: tensor for value, tensor in made if value >= 0 and tensor is not None}
        return {} if update.kept is None else {update.kept: weight}

    def set_keyword(self, key: str, value: Any) -> None:
        """Changes a constant argument, such as the learning rate, of the calls that have it."""
        for _, _, kwargs, _ in self._calls:
            if key in kwargs:
                kwargs[key] = value


@dataclass(frozen=True, slots=True)
class UpdateOfPiece:
    """What a `PieceUpdate` is made of."""

    calls: Sequence[Any]  # of the update of the whole parameter
    weight: Member
    weight_value: int
    gradient: int  # the tensor of the piece
    gradient_value: int
    state: Mapping[int, StridedLayout]  # by value
    copies: frozenset[int]  # the values that begin as copies of the weight
    piece: tuple[int, int]  # the elements from the first to behind the last
    is_cut: bool  # the tensor of the weight is the piece
    kept: int | None  # the number that the weight is held by until it is gathered


def _filled(item: Any, values: Mapping[int, Tensor]) -> Any:
    """Returns an argument with tensors in place of references."""
    from gdp.models.pytorch.program import Ref

    if type(item) is Ref:
        return values[item.value]
    if type(item) in (tuple, list):
        return type(item)(_filled(part, values) for part in item)
    return {key: _filled(part, values) for key, part in item.items()} if type(item) is dict else item
