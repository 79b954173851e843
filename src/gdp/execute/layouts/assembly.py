"""Assembly: what each tensor of a cut step has, and what the ops do that its layout adds.

Ops are taken in their order, so that an exchange is known by its first op when its hops come, and a gradient by its
last sum when an update reads it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gdp.errors import InputError
from gdp.execute.layouts.copies import Copies, read_by, tensors_of
from gdp.execute.layouts.cut import Cut, RingPlaces
from gdp.execute.layouts.routines import (
    AllReduceDone,
    GradientView,
    Hop,
    Member,
    Nothing,
    ParametersDone,
    ParametersReady,
    PieceUpdate,
    ScatterDone,
    Sum,
    SumReady,
    UpdateOfPiece,
    WeightsDone,
    WeightsReady,
)
from gdp.execute.layouts.updates import Content, Update, updates_of
from gdp.graph import Graph
from gdp.models.pytorch import Program
from gdp.models.pytorch.routine import OpRoutine
from gdp.models.pytorch.strides import StridedLayout
from gdp.parallel.batches import DONE as BATCH_DONE
from gdp.parallel.rings import DONE, READY

Make = Callable[[torch.device | None], OpRoutine]


@dataclass(frozen=True, slots=True)
class Pieces:
    """A tensor that is cut over replicas: tensors and elements [R], the first and the one behind the last."""

    tensors: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    layout: StridedLayout  # of the whole

    def joined(self, held: Mapping[int, Tensor]) -> Tensor:
        """Returns the whole, on the CPU."""
        ordered = sorted(zip(self.spans, self.tensors, strict=True))
        row = torch.cat([held[tensor].to("cpu") for (first, last), tensor in ordered if last > first])
        return row.as_strided(self.layout.size, self.layout.stride)


@dataclass(slots=True, eq=False)
class _Exchange:
    """One exchange of one replica and micro-batch."""

    kind: str  # all_reduce, reduce_scatter, all_gather
    replica: int
    cut: Cut
    dtype: torch.dtype
    buffer: int  # its number among what is held
    members: list[Member] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)  # of the members, where a replica has a piece
    parameters: list[int] = field(default_factory=list)  # members of a gather of parameters: tensors of the part
    memory: int = 0


class Assembly:
    """The tensors and made ops of `step`, whose copies are of `program`. M ops and S tensors of the step."""

    def __init__(self, program: Program, step: Graph, places: RingPlaces, zero: int) -> None:
        self.program, self.step, self.places, self.zero = program, step, places, zero
        self.copies = Copies.of(program.graph, step)
        self.made_by, self.read_by = tensors_of(step), read_by(step)
        self.values = [-1 if origin < 0 else program.tensor_values[origin] for origin in self.copies.tensor]
        self.parts = [None if origin < 0 else program.tensor_layouts[origin] for origin in self.copies.tensor]
        self.layouts, self._next_value = dict(program.layouts), max(program.layouts, default=-1) + 1
        self.updates = updates_of(program)
        self.made: dict[int, Make] = {}
        self._by_gradient: dict[Content, list[Update]] = {}
        for update in self.updates.values():
            self._by_gradient.setdefault(update.gradient, []).append(update)
        self._exchanges: dict[tuple[str, int, int], _Exchange] = {}
        self._cut_of: dict[int, tuple[Cut, int]] = {}  # by weight: where its gradient is cut, and as which member
        self._held = 0  # numbers below it are taken
        self._rows: dict[tuple[int, torch.dtype], int] = {}  # values that are a row of elements
        is_made = step.is_collective.tolist()
        self._is_hop = [
            made and kind.rpartition(".")[2] in ("add", "copy") for made, kind in zip(is_made, step.kinds, strict=True)
        ]
        self._overwritten = self._overwritten_gradients()
        if zero == 3:
            self._cut_parameters()
        for op, origin in enumerate(self.copies.op):
            if is_made[op]:
                self._add_collective(op)
            elif step.kinds[op] == BATCH_DONE:
                self.made[op] = lambda _device: Nothing()
            elif origin < 0:
                self._add_sum(op)
            elif zero and step.phases[op] == "update":
                self._add_update(op, origin)

    # -- gradients and weights ---------------------------------------------------------------------------------------

    def piece(self, weight: int, replica: int) -> tuple[int, int]:
        """Returns the elements of a weight, a tensor of the program, that a replica owns."""
        cut, member = self._cut_of[weight]
        first, last, _ = cut.piece(member, self.places.owned(replica))
        return first, last

    def gradient_of(self, op: int, update: Update) -> int:
        """Returns the tensor of the gradient that the copy `op` of an update reads."""
        (gradient,) = (
            tensor
            for tensor in self._contents(op)
            if self.copies.tensor[tensor] != update.weight and not self._is_source(tensor)
        )
        return gradient

    def parameter_pieces(self) -> dict[int, Pieces]:
        """Returns the parameters that are cut, by tensor of the program."""
        if self.zero < 3:
            return {}
        found: dict[int, list[tuple[int, tuple[int, int]]]] = {}
        for tensor, origin in enumerate(self.copies.tensor):
            if origin in self._cut_of:
                replica = self.copies.replica[int(self.step.producers[tensor])]
                found.setdefault(origin, []).append((tensor, self.piece(origin, replica)))
        return {
            origin: Pieces(tuple(own for own, _ in pieces), tuple(span for _, span in pieces), self._layout_of(origin))
            for origin, pieces in found.items()
        }

    def _is_source(self, tensor: int) -> bool:
        return self.copies.op[int(self.step.producers[tensor])] in self.program.sources

    def _cut_parameters(self) -> None:
        """Makes parameters of all replicas pieces: those that the first ops of gathers read."""
        for op, kind in enumerate(self.step.kinds):
            if kind != f"all_gather.{READY}" or self.copies.replica[op]:
                continue
            for tensor in self._contents(op):
                weight = self.copies.tensor[tensor]
                layout = self._layout_of(weight)
                cut = Cut((_numel(layout),), self.places.num_inner, self.places.num_outer, is_each=True)
                self._cut_of.setdefault(weight, (cut, 0))
        for tensor, origin in enumerate(self.copies.tensor):
            if origin in self._cut_of:
                replica = self.copies.replica[int(self.step.producers[tensor])]
                first, last = self.piece(origin, replica)
                self._set(tensor, self._row(last - first, self._layout_of(origin).dtype))
            elif origin >= 0 and self.program.graph.view_of[origin] in self._cut_of:
                self._set(tensor, -1)

    def _add_sum(self, op: int) -> None:
        before, gradient = self._contents(op)
        sums = [tensor for tensor in (before, gradient) if self.copies.op[int(self.step.producers[tensor])] < 0]
        if gradient in sums and before not in sums:
            before, gradient = gradient, before
        is_in_place = before in sums and not self._is_exchange(before) and len(self.step.consumers_of(before)) == 1
        (result,) = (tensor for tensor in self.made_by[op] if self.step.tensor_bytes[tensor] > 0)
        self.values[result], self.parts[result] = self.values[gradient], self.parts[gradient]
        routine = Sum(before, gradient, result, is_in_place)
        self.made[op] = lambda _device: routine

    def _add_update(self, op: int, origin: int) -> None:
        update = self.updates.get(origin)
        if update is None:
            raise InputError(
                f"zero={self.zero}: {self.step.op_names[op]!r} is no update of one parameter by one gradient, so it "
                "cannot be cut; place with zero=0"
            )
        update.check_alone(self.program, self.zero)
        replica = self.copies.replica[op]
        gradient = self.gradient_of(op, update)
        (weight,) = (tensor for tensor in self._contents(op) if self.copies.tensor[tensor] == update.weight)
        program, is_cut = self.program, self.zero == 3
        piece = self.piece(update.weight, replica)
        kept = None if is_cut else self._kept(update.weight, replica)
        weight_value = program.tensor_values[update.weight]
        spec = UpdateOfPiece(
            program.calls[update.op],
            Member(weight, update.layout),
            weight_value,
            gradient,
            update.gradient[0],
            {value: program.layouts[value] for value in program.private.get(update.op, ())},
            frozenset(value for value, ref in program.state_copies.items() if ref.value == weight_value),
            piece,
            is_cut,
            kept,
        )
        self.made[op] = partial(PieceUpdate, spec)

    # -- exchanges ---------------------------------------------------------------------------------------------------

    def _add_collective(self, op: int) -> None:
        """Adds an op of an exchange: `KIND.NUMBER.ready`, `KIND.NUMBER.host.add.CHUNK`, and so on."""
        names = self.step.copy_names
        kind, number, *rest = names.bases[int(names.base[op])].split(".")
        key = f"{kind}.{number}", self.copies.microbatch[op], self.copies.replica[op]
        is_inside = rest[0] == "host"
        what = rest[is_inside]
        if what == READY:
            self._exchanges[key] = self._begin(op, kind, self.copies.replica[op])
        exchange = self._exchanges[key]
        sent = {tensor: self._sent(exchange, tensor) for tensor in self.made_by[op] if self._goes_round(tensor)}
        if what == READY:
            routine = self._ready(op, exchange, sent)
        elif what == DONE:
            routine = self._done(op, exchange)
        else:
            taken = None
            if what != "joined":
                (tensor,) = (tensor for tensor in self.read_by[op] if self.step.tensor_bytes[tensor] > 0)
                taken = tensor, self._elements(exchange, op)
            routine = Hop(exchange.buffer, exchange.cut, exchange.dtype, taken, what == "add", sent)
        self.made[op] = lambda _device: routine

    def _begin(self, op: int, kind: str, replica: int) -> _Exchange:
        inner, outer = self.places.num_inner, self.places.num_outer
        self._held -= 2
        buffer, memory = self._held, self._held + 1
        if kind == "all_gather" and self.zero < 3:
            makers = {int(self.step.producers[tensor]) for tensor in self.read_by[op]}
            updates = sorted((self.updates[self.copies.op[op]] for op in makers), key=lambda update: update.gradient[0])
            cuts = {id(self._cut_of[update.weight][0]): self._cut_of[update.weight][0] for update in updates}
            cut = next(iter(cuts.values()))
            if len(cuts) != 1 or len(cut.sizes) != len(updates):
                raise InputError(
                    f"zero={self.zero}: {updates[0].name!r} is gathered with other parameters than its gradient is "
                    "summed with, which cannot be run yet; place with zero=0"
                )
            updates.sort(key=lambda update: self._cut_of[update.weight][1])
            members = [Member(self._kept(update.weight, replica), update.layout) for update in updates]
            return _Exchange(kind, replica, cut, updates[0].layout.dtype, buffer, members, updates)
        tensors = sorted(self._contents(op), key=self._order)
        if kind == "all_gather":
            weights = [self.copies.tensor[tensor] for tensor in tensors]
            members = [Member(tensor, self._layout_of(weight)) for tensor, weight in zip(tensors, weights, strict=True)]
            cut = Cut(tuple(_numel(member.layout) for member in members), inner, outer, is_each=True)
            dtype = self._one_dtype(members)
            return _Exchange(kind, replica, cut, dtype, buffer, members, parameters=weights, memory=memory)
        if not self.zero:
            members = [Member(tensor, self._memory_of(tensor)) for tensor in tensors]
            cut = Cut(tuple(_numel(member.layout) for member in members), inner, outer)
            return _Exchange(kind, replica, cut, self._one_dtype(members), buffer, members)
        updates = [self._update_of(tensor) for tensor in tensors]
        members = [Member(tensor, update.layout) for tensor, update in zip(tensors, updates, strict=True)]
        cut = Cut(tuple(_numel(member.layout) for member in members), inner, outer, is_each=self.zero == 3)
        if self.zero < 3:
            for number, update in enumerate(updates):
                cut, _ = self._cut_of.setdefault(update.weight, (cut, number))
        dtype = self.layouts[self.values[tensors[0]]].dtype
        return _Exchange(kind, replica, cut, dtype, buffer, members, updates)

    def _ready(self, op: int, exchange: _Exchange, sent: dict[int, slice]) -> OpRoutine:
        own = self.places.owned(exchange.replica)
        if exchange.kind != "all_gather":
            reads: list[GradientView | None] = [None] * len(exchange.members)
            for number, update in enumerate(exchange.updates):
                value, part = update.gradient
                reads[number] = GradientView(self.layouts[value], part, update.view)
            is_all = exchange.kind == "all_reduce"
            return SumReady(exchange.buffer, exchange.cut, exchange.dtype, exchange.members, reads, sent, is_all)
        if self.zero < 3:
            return WeightsReady(exchange.buffer, exchange.cut, exchange.dtype, exchange.members, own, sent)
        return ParametersReady(
            exchange.buffer,
            exchange.memory,
            exchange.cut,
            exchange.dtype,
            exchange.members,
            own,
            sent,
            self._gathered(op, exchange),
        )

    def _done(self, op: int, exchange: _Exchange) -> OpRoutine:
        if exchange.kind == "all_reduce":
            is_overwritten = any(self.values[member.tensor] in self._overwritten for member in exchange.members)
            return AllReduceDone(exchange.buffer, exchange.members, is_overwritten)
        if exchange.kind == "all_gather":
            if self.zero < 3:
                return WeightsDone(exchange.buffer, exchange.cut, exchange.members)
            return ParametersDone(
                exchange.buffer, exchange.memory, exchange.cut, exchange.members, self._gathered(op, exchange)
            )
        own, results = self.places.owned(exchange.replica), {}
        pieces = [exchange.cut.piece(number, own) for number in range(len(exchange.members))]
        if self.zero == 1:
            tensors = [member.tensor for member in exchange.members]
        else:
            chunks = [tensor for tensor in self.made_by[op] if self.step.tensor_bytes[tensor] > 0]
            by_update = {self._final_update(tensor): tensor for tensor in chunks}
            tensors = [by_update[update.op] for update in exchange.updates]
        for tensor, (first, last, place) in zip(tensors, pieces, strict=True):
            results[tensor] = slice(place, place + last - first)
            if self.zero > 1:
                self._set(tensor, self._row(last - first, exchange.dtype))
        return ScatterDone(exchange.buffer, results)

    def _gathered(self, op: int, exchange: _Exchange) -> dict[int, tuple[int, StridedLayout | None]]:
        """Returns by tensor that `op` makes of gathered parameters: the member, and the part of it."""
        program, number = self.program, {weight: place for place, weight in enumerate(exchange.parameters)}
        own = set(self.made_by[op])
        found = {}
        for user in {int(user) for tensor in own for user in self.step.consumers_of(tensor)}:
            origin = self.copies.op[user]
            if origin < 0:
                continue
            now = [t for t in self.read_by[user] if t in own and self.step.tensor_bytes[t] > 0]
            before = [t for t in program.inputs_of[origin] if _base(program, t) in number]
            for tensor, weight in zip(now, before, strict=bool(now)) if now else ():
                self.values[tensor], self.parts[tensor] = program.tensor_values[weight], program.tensor_layouts[weight]
                found[tensor] = number[_base(program, weight)], program.tensor_layouts[weight]
        return found

    # -- small facts -------------------------------------------------------------------------------------------------

    def _contents(self, op: int) -> list[int]:
        """Returns the tensors with content that an op reads."""
        return [tensor for tensor in self.read_by[op] if self.values[tensor] >= 0]

    def _goes_round(self, tensor: int) -> bool:
        readers = self.step.consumers_of(tensor)
        return self.step.tensor_bytes[tensor] > 0 and len(readers) == 1 and self._is_hop[int(readers[0])]

    def _sent(self, exchange: _Exchange, tensor: int) -> slice:
        """Returns the elements of the buffer that a tensor which goes round has; they are the receiver's as well."""
        elements = self._elements(exchange, int(self.step.consumers_of(tensor)[0]))
        self._set(tensor, self._row(elements.stop - elements.start, exchange.dtype))
        return elements

    def _elements(self, exchange: _Exchange, op: int) -> slice:
        names = self.step.copy_names
        fields = names.bases[int(names.base[op])].split(".")
        is_inside = fields[2] == "host"
        return self.places.elements(exchange.cut, exchange.replica, int(fields[-1]), is_inside=is_inside)

    def _is_exchange(self, tensor: int) -> bool:
        return bool(self.step.is_collective[self.step.producers[tensor]])

    def _update_of(self, tensor: int) -> Update:
        """Returns the update that reads a gradient; InputError if there are several."""
        updates = self._by_gradient.get((self.values[tensor], self.parts[tensor]), [])
        if len(updates) != 1:
            name = updates[0].name if updates else self.step.op_names[int(self.step.producers[tensor])]
            raise InputError(
                f"zero={self.zero}: the gradient of {name!r} is read by {len(updates) or 'no'} updates of one "
                "parameter, and a piece of it would be of use to one; place with zero=0"
            )
        return updates[0]

    def _final_update(self, tensor: int) -> int:
        """Returns the update, an op of the program, that reads a piece of a gradient after all sums."""
        reader = int(self.step.consumers_of(tensor)[0])
        while self.copies.op[reader] < 0:
            (tensor,) = (made for made in self.made_by[reader] if self.step.tensor_bytes[made] > 0)
            reader = int(self.step.consumers_of(tensor)[0])
        return self.copies.op[reader]

    def _overwritten_gradients(self) -> set[int]:
        """Returns the values of gradients that updates write to."""
        gradients = {ref.value for ref in self.program.gradients.values()}
        late = [
            calls
            for calls, phase in zip(self.program.calls, self.program.graph.phases, strict=True)
            if phase == "update"
        ]
        return gradients & {old for calls in late for call in calls for old, _ in call.writes}

    def _kept(self, weight: int, replica: int) -> int:
        """Returns the number that an updated weight is held by until it is gathered."""
        return -(10**9) - weight * 64 - replica

    def _order(self, tensor: int) -> tuple[Any, ...]:
        part = self.parts[tensor]
        origin = self.copies.tensor[tensor]
        if self.zero == 3 and origin in self._cut_of:
            return origin, -1, ()
        return self.values[tensor], *((-1, ()) if part is None else (part.offset, part.size))

    def _memory_of(self, tensor: int) -> StridedLayout:
        """Returns the layout of a tensor's content in memory of its own."""
        part = self.parts[tensor]
        if part is None:
            return self.layouts[self.values[tensor]]
        strides, step = [], 1
        for size in reversed(part.size):
            strides.append(step)
            step *= size
        return StridedLayout(part.size, tuple(reversed(strides)), 0, part.dtype)

    def _layout_of(self, weight: int) -> StridedLayout:
        return self.program.layouts[self.program.tensor_values[weight]]

    def _one_dtype(self, members: Sequence[Member]) -> torch.dtype:
        dtypes = {member.layout.dtype for member in members}
        if len(dtypes) != 1:
            raise InputError(
                f"an exchange of {', '.join(sorted(map(str, dtypes)))} together cannot be run; place with "
                "--parallel none"
            )
        return dtypes.pop()

    def _row(self, size: int, dtype: torch.dtype) -> int:
        """Returns the value that stands for a row of elements."""
        if (size, dtype) not in self._rows:
            value = self._rows[size, dtype] = self._next_value + len(self._rows)
            self.layouts[value] = StridedLayout((size,), (1,), 0, dtype)
        return self._rows[size, dtype]

    def _set(self, tensor: int, value: int) -> None:
        self.values[tensor], self.parts[tensor] = value, None


def _base(program: Program, tensor: int) -> int:
    base = int(program.graph.view_of[tensor])
    return base if base >= 0 else tensor


def _numel(layout: StridedLayout) -> int:
    count = 1
    for size in layout.size:
        count *= size
    return count
