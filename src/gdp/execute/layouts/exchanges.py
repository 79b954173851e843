"""Exchanges: the ops between replicas that a layout adds, each with what it sends, takes and makes.

zero=0   gradients -> all_reduce     -> sums, under the numbers of the gradients
zero=1   gradients -> reduce_scatter -> pieces, under the numbers of the gradients;  weights    -> all_gather
zero=2   gradients -> reduce_scatter -> pieces, tensors of the last op;              weights    -> all_gather
zero=3   gradients -> reduce_scatter -> pieces, tensors of the last op;              parameters -> all_gather
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from gdp.errors import InputError
from gdp.execute.layouts.cut import Cut
from gdp.execute.layouts.exchange_routines import (
    AllReduceDone,
    GradientView,
    Hop,
    Member,
    ParametersDone,
    ParametersReady,
    RowExchange,
    ScatterDone,
    Sent,
    SumReady,
    WeightsDone,
    WeightsReady,
)
from gdp.execute.layouts.pieces import Ownership
from gdp.execute.layouts.step_tensors import StepTensors
from gdp.execute.layouts.updates import Content, Update
from gdp.graph.copies import (
    EXCHANGE_END,
    EXCHANGE_START,
    HOPS,
    HOST_RING_COPY,
    HOST_RING_END,
    HOST_RING_SUM,
    RING_SUM,
    exchange_of,
    turn_in_exchange,
)
from gdp.models.pytorch import Program
from gdp.models.pytorch.optimizers import numel
from gdp.models.pytorch.routine import OpRoutine
from gdp.models.pytorch.strides import StridedLayout
from gdp.parallel.layout import MAX_REPLICAS

Make = Callable[[torch.device | None], OpRoutine]
"""Makes the routine of an op for a device; None: the CPU."""


class Exchanges:
    """Makes the ops of exchanges; ops are given in their order, so that an exchange begins with its first op."""

    def __init__(self, tensors: StepTensors, owned: Ownership, updates: Mapping[int, Update], zero: int) -> None:
        self.tensors, self.owned, self.updates, self.zero = tensors, owned, updates, zero
        self.places = owned.places
        self._by_gradient: dict[Content, list[Update]] = {}
        for update in updates.values():
            self._by_gradient.setdefault(update.gradient, []).append(update)
        self._overwritten = _overwritten_gradients(tensors.program)
        outputs = {ref.value for ref in tensors.program.outputs.values()}
        self._kept_values = outputs | _overwritten_early(tensors.program)
        self._known: dict[tuple[int, int, int], _ReplicaExchange] = {}
        self._exchange = exchange_of(tensors.step).tolist()
        self._turn = turn_in_exchange(tensors.step).tolist()
        self._is_hop = tensors.step.is_in_role(*HOPS).tolist()

    def make(self, op: int) -> Make:
        """Returns what makes an op of an exchange."""
        tensors, copies = self.tensors, self.tensors.copies
        role = tensors.step.roles[op]
        key = self._exchange[op], copies.microbatch[op], copies.replica[op]
        if role == EXCHANGE_START:
            self._known[key] = self._begin(tensors.step.kinds[op].partition(".")[0], op, copies.replica[op])
        own = self._known[key]
        exchange = own.exchange
        sent = {tensor: self._sent(exchange, tensor) for tensor in tensors.made_by[op] if self._goes_round(tensor)}
        if role == EXCHANGE_START:
            return own.ready(op, sent)
        if role == EXCHANGE_END:
            return own.done(op)
        taken = None
        if role != HOST_RING_END:
            (tensor,) = tensors.with_bytes(tensors.read_by[op])
            taken = tensor, self._chunks(op)
        return lambda device: Hop(exchange.on(device), taken, role in (RING_SUM, HOST_RING_SUM), sent)

    def _begin(self, kind: str, op: int, replica: int) -> "_ReplicaExchange":
        number, own = -1 - 2 * len(self._known), self.places.owned(replica)
        if kind == "all_gather":
            return self._gather(number, op, replica, own)
        tensors = self.tensors
        gradients = sorted(tensors.contents(op), key=self._order)
        if not self.zero:
            members = [
                Member(gradient, tensors.memory_of(gradient), is_alone=self._is_alone(gradient))
                for gradient in gradients
            ]
            cut = Cut.joined([numel(member.layout) for member in members], self.places.num_inner, self.places.num_outer)
            is_overwritten = any(tensors.values[gradient] in self._overwritten for gradient in gradients)
            return _AllReduce(RowExchange(number, cut, _one_dtype(members)), members, own, is_overwritten)
        updates = [self._updates_of(gradient) for gradient in gradients]
        layouts = [tensors.layout_of(of_gradient[0].weight) for of_gradient in updates]
        sizes = [numel(layout) for layout in layouts]
        if self.zero == 3:
            cut = Cut.each(sizes, self.places.num_replicas)
        else:
            cut = Cut.joined(sizes, self.places.num_inner, self.places.num_outer)
            for spans, of_gradient in zip(cut.spans, updates, strict=True):
                for update in of_gradient:
                    self.owned.cut(update.weight, spans)
        members = [
            Member(gradient, layout, self._view_of(of_gradient[0]), self._is_alone(gradient))
            for gradient, layout, of_gradient in zip(gradients, layouts, updates, strict=True)
        ]
        exchange = RowExchange(number, cut, tensors.layouts[tensors.values[gradients[0]]].dtype)
        return _ReduceScatter(exchange, members, own, updates, tensors, is_in_place=self.zero == 1)

    def _gather(self, number: int, op: int, replica: int, own: int) -> "_ReplicaExchange":
        tensors = self.tensors
        if self.zero == 3:
            members = [
                Member(tensor, tensors.layout_of(tensors.copies.tensor[tensor]))
                for tensor in sorted(tensors.contents(op), key=tensors.copies.tensor.__getitem__)
            ]
            weights = [tensors.copies.tensor[member.tensor] for member in members]
            return _ParameterGather(self._gathered(number, members, weights), members, weights, own, tensors)
        makers = {tensors.copies.op[int(tensors.step.producers[tensor])] for tensor in tensors.read_by[op]}
        weights = sorted(self.updates[maker].weight for maker in makers if maker in self.updates)
        members = [Member(kept_number(weight, replica), tensors.layout_of(weight)) for weight in weights]
        return _WeightGather(self._gathered(number, members, weights), members, own)

    def _gathered(self, number: int, members: Sequence[Member], weights: Sequence[int]) -> RowExchange:
        """Returns the exchange of a gather; weights of several types come together as bytes."""
        dtypes = {member.layout.dtype for member in members}
        if len(dtypes) == 1:
            return RowExchange(number, self.owned.gathered(weights, [1] * len(weights)), dtypes.pop())
        sizes = [member.layout.dtype.itemsize for member in members]
        return RowExchange(number, self.owned.gathered(weights, sizes), torch.uint8)

    def _updates_of(self, gradient: int) -> list[Update]:
        """Returns the updates that read a gradient; InputError where they cannot read one piece."""
        tensors = self.tensors
        updates = self._by_gradient.get((tensors.values[gradient], tensors.parts[gradient]), [])
        if not updates:
            name = tensors.step.op_names[int(tensors.step.producers[gradient])]
            raise InputError(
                f"zero={self.zero}: the gradient that {name!r} makes is read by no update of one parameter, so it "
                "cannot be cut; place with zero=0"
            )
        layouts = [tensors.layout_of(update.weight) for update in updates]
        for update, layout in zip(updates, layouts, strict=True):
            if (update.view, layout.size, layout.stride) != (updates[0].view, layouts[0].size, layouts[0].stride):
                raise InputError(
                    f"zero={self.zero}: parameters {updates[0].name!r} and {update.name!r} have one gradient, but lie "
                    "differently in memory; place with zero=0"
                )
        return updates

    def _view_of(self, update: Update) -> GradientView:
        value, part = update.gradient
        return GradientView(self.tensors.layouts[value], part, update.view)

    def _order(self, gradient: int) -> tuple[int, ...]:
        """Returns a key that sorts the gradients of a bucket alike in all replicas."""
        part = self.tensors.parts[gradient]
        return self.tensors.values[gradient], *(() if part is None else (part.offset, *part.size))

    def _goes_round(self, tensor: int) -> bool:
        readers = self.tensors.step.consumers_of(tensor)
        return self.tensors.step.tensor_bytes[tensor] > 0 and len(readers) == 1 and self._is_hop[int(readers[0])]

    def _sent(self, exchange: RowExchange, tensor: int) -> range:
        """Returns the chunks that a tensor which goes round has; they are the receiver's as well."""
        chunks = self._chunks(int(self.tensors.step.consumers_of(tensor)[0]))
        self.tensors.set_row(tensor, len(chunks) * exchange.cut.chunk_elements, exchange.dtype)
        return chunks

    def _chunks(self, op: int) -> range:
        """Returns the chunks that a hop takes: those of rings come in turn, a sum's from that of the place itself."""
        role, replica = self.tensors.step.roles[op], self.tensors.copies.replica[op]
        is_inside = role in (HOST_RING_SUM, HOST_RING_COPY)
        return self.places.taken(replica, self._turn[op], is_sum=role in (RING_SUM, HOST_RING_SUM), is_inside=is_inside)

    def _is_alone(self, gradient: int) -> bool:
        """Returns whether exchanges and updates alone read the memory of a gradient, so that its sum may be made there.

        Not where the value has several tensors, such as parts that may overlap, or is an output or a gradient that
        goes on through the backward pass.
        """
        tensors, step = self.tensors, self.tensors.step
        value, producer = tensors.values[gradient], int(step.producers[gradient])
        readers = step.consumers_of(gradient)
        of_value = [
            tensor for tensor in tensors.with_bytes(tensors.made_by[producer]) if tensors.values[tensor] == value
        ]
        return (
            of_value == [gradient]
            and not step.is_kept[gradient]
            and not tensors.is_source(gradient)
            and value not in self._kept_values
            and all(step.is_collective[op] or step.phases[op] == "update" for op in readers.tolist())
        )


class _ReplicaExchange(Protocol):
    """One exchange of one replica and micro-batch."""

    @property
    def exchange(self) -> RowExchange: ...

    def ready(self, op: int, sent: Sent) -> Make:
        """Returns what makes its first op."""

    def done(self, op: int) -> Make:
        """Returns what makes its last op."""


@dataclass(frozen=True)
class _AllReduce:
    exchange: RowExchange
    members: Sequence[Member]
    own: int  # the chunk
    is_overwritten: bool

    def ready(self, op: int, sent: Sent) -> Make:
        return lambda device: SumReady(self.exchange.on(device), self.members, sent)

    def done(self, op: int) -> Make:
        return lambda device: AllReduceDone(self.exchange.on(device), self.members, self.own, self.is_overwritten)


@dataclass(frozen=True)
class _ReduceScatter:
    exchange: RowExchange
    members: Sequence[Member]
    own: int  # the chunk
    updates: Sequence[Sequence[Update]]  # of each member
    tensors: StepTensors
    is_in_place: bool  # pieces take the numbers of the gradients; else the last op makes tensors of them

    def ready(self, op: int, sent: Sent) -> Make:
        return lambda device: SumReady(self.exchange.on(device), self.members, sent)

    def done(self, op: int) -> Make:
        results = {}
        made = {} if self.is_in_place else {self._reader(tensor): tensor for tensor in self._pieces(op)}
        for number, (member, updates) in enumerate(zip(self.members, self.updates, strict=True)):
            first, last = self.exchange.cut.spans[number][self.own]
            tensor = member.tensor if self.is_in_place else next(made[own.op] for own in updates if own.op in made)
            results[tensor] = number, first, last
            if not self.is_in_place:
                self.tensors.set_row(tensor, last - first, self.exchange.dtype)
        return lambda device: ScatterDone(self.exchange.on(device), results, not self.is_in_place)

    def _pieces(self, op: int) -> list[int]:
        return self.tensors.with_bytes(self.tensors.made_by[op])

    def _reader(self, tensor: int) -> int:
        """Returns the first update, an op of the program, that reads a piece of a gradient after all sums."""
        step, copies = self.tensors.step, self.tensors.copies
        reader = int(step.consumers_of(tensor)[0])
        while copies.op[reader] < 0:
            (tensor,) = self._pieces(reader)
            reader = int(step.consumers_of(tensor)[0])
        return copies.op[reader]


@dataclass(frozen=True)
class _WeightGather:
    exchange: RowExchange
    members: Sequence[Member]
    own: int

    def ready(self, op: int, sent: Sent) -> Make:
        return lambda device: WeightsReady(self.exchange.on(device), self.members, self.own, sent)

    def done(self, op: int) -> Make:
        return lambda device: WeightsDone(self.exchange.on(device), self.own)


@dataclass(frozen=True)
class _ParameterGather:
    exchange: RowExchange
    members: Sequence[Member]
    weights: Sequence[int]  # of the program
    own: int
    tensors: StepTensors

    def ready(self, op: int, sent: Sent) -> Make:
        memory, results = self.exchange.number - 1, self._gathered(op)
        return lambda device: ParametersReady(self.exchange.on(device), memory, self.members, self.own, sent, results)

    def done(self, op: int) -> Make:
        memory, results = self.exchange.number - 1, self._gathered(op)
        return lambda device: ParametersDone(self.exchange.on(device), memory, self.members, results)

    def _gathered(self, op: int) -> dict[int, tuple[int, StridedLayout | None]]:
        """Returns by tensor that `op` makes of gathered parameters: the member, and the part of it."""
        tensors, program = self.tensors, self.tensors.program
        number = {weight: place for place, weight in enumerate(self.weights)}
        own = set(tensors.made_by[op])
        found = {}
        for user in {int(user) for tensor in own for user in tensors.step.consumers_of(tensor)}:
            origin = tensors.copies.op[user]
            now = [tensor for tensor in tensors.with_bytes(tensors.read_by[user]) if tensor in own]
            if origin < 0 or not now:
                continue
            read = [tensor for tensor in program.inputs_of[origin] if tensors.base(tensor) in number]
            read = [tensor for tensor in read if program.graph.tensor_bytes[tensor] > 0]
            for tensor, before in zip(now, sorted(read), strict=True):
                ref = program.ref_of(before)
                tensors.values[tensor], tensors.parts[tensor] = ref.value, ref.layout
                found[tensor] = number[tensors.base(before)], program.tensor_layouts[before]
        return found


def kept_number(weight: int, replica: int) -> int:
    """Returns the number that an updated weight of a replica is held by until it is gathered."""
    return -(2**30) - weight * MAX_REPLICAS - replica


def _one_dtype(members: Sequence[Member]) -> torch.dtype:
    dtypes = {member.layout.dtype for member in members}
    if len(dtypes) != 1:
        raise InputError(
            f"a sum of {', '.join(sorted(map(str, dtypes)))} over replicas in one bucket cannot be run; place with "
            "--parallel none"
        )
    return dtypes.pop()


def _overwritten_gradients(program: Program) -> set[int]:
    """Returns the values of gradients that updates write to."""
    gradients = {ref.value for ref in program.gradients.values()}
    late = [calls for calls, phase in zip(program.calls, program.graph.phases, strict=True) if phase == "update"]
    return gradients & {old for calls in late for call in calls for old, _ in call.writes}


def _overwritten_early(program: Program) -> set[int]:
    """Returns the values that ops other than updates write to."""
    early = [calls for calls, phase in zip(program.calls, program.graph.phases, strict=True) if phase != "update"]
    return {old for calls in early for call in calls for old, _ in call.writes}
