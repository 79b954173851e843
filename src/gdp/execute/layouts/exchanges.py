"""Exchanges: the ops between replicas that a layout adds, each with what it sends, takes and makes.

zero=0   gradients -> all_reduce     -> sums, under the numbers of the gradients
zero=1   gradients -> reduce_scatter -> pieces, under the numbers of the gradients;  weights    -> all_gather
zero=2   gradients -> reduce_scatter -> pieces, tensors of the last op;              weights    -> all_gather
zero=3   gradients -> reduce_scatter -> pieces, tensors of the last op;              parameters -> all_gather"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from gdp.arrays import I64
from gdp.errors import InputError
from gdp.execute.layouts.cut import Cut, Ownership, Span
from gdp.execute.layouts.exchange_routines import (
    AllReduce,
    Device,
    GradientView,
    Held,
    MadeRoutine,
    Member,
    ParameterGather,
    ReduceScatter,
    Results,
    RowExchange,
    WeightGather,
)
from gdp.execute.layouts.updates import Content, Update
from gdp.graph import Graph
from gdp.graph.copies import (
    EXCHANGE_END,
    EXCHANGE_START,
    HOPS,
    HOST_RING_COPY,
    HOST_RING_END,
    HOST_RING_SUM,
    RING_SUM,
    exchange_of,
    numbers_in,
    turn_in_exchange,
)
from gdp.models.pytorch import Program
from gdp.models.pytorch.optimizers import numel
from gdp.models.pytorch.routine import OpRoutine
from gdp.models.pytorch.strides import StridedLayout, contiguous
from gdp.parallel.layout import MAX_REPLICAS

Make = Callable[[torch.device | None], OpRoutine]  # makes the routine of an op for a device; None: the CPU
ReplicaExchange = AllReduce | ReduceScatter | WeightGather | ParameterGather
"""One exchange of a replica and micro-batch."""


class StepTensors:
    """The M ops and S tensors of `step`, whose copies are of `program`, with the values of their originals. `op_origin`
    [M] and `origin` [S] are the ops and tensors that they are copies of; -1: the layout makes them. `values` [S] are of
    the program, or beyond them (-1: no content), `parts` [S] None for a whole value, `layouts` by value, and `made_by`
    and `read_by` the tensors of each op, ascending."""

    def __init__(self, program: Program, step: Graph) -> None:
        self.program, self.step = program, step
        part = program.graph
        self.op_origin: list[int] = numbers_in(part, step, step.first_copy).tolist()
        self.made_by = _tensors_by(step.producers, np.arange(step.num_tensors), step.num_ops)
        self.read_by = _tensors_by(step.consumers, step.edge_tensors, step.num_ops)
        self.origin = [-1] * step.num_tensors
        of_part = _tensors_by(part.producers, np.arange(part.num_tensors), part.num_ops)
        for op, origin in enumerate(self.op_origin):  # a copy makes the tensors of its op first, in their order
            for own, tensor in zip(self.made_by[op], of_part[origin] if origin >= 0 else (), strict=False):
                self.origin[own] = tensor
        self.values = [-1 if origin < 0 else program.tensor_values[origin] for origin in self.origin]
        self.parts = [None if origin < 0 else program.tensor_layouts[origin] for origin in self.origin]
        self.layouts = dict(program.layouts)
        self._rows: dict[tuple[int, torch.dtype], int] = {}  # values that are a row of elements
        self._first_row = max(self.layouts, default=-1) + 1

    def contents(self, op: int) -> list[int]:
        """Returns the tensors with content that an op reads."""
        return [tensor for tensor in self.read_by[op] if self.values[tensor] >= 0]

    def with_bytes(self, tensors: Sequence[int]) -> list[int]:
        """Returns the tensors that are no control dependencies."""
        return [tensor for tensor in tensors if self.step.tensor_bytes[tensor] > 0]

    def copy_value(self, tensor: int, other: int) -> None:
        """Gives a tensor the value of another one."""
        self.values[tensor], self.parts[tensor] = self.values[other], self.parts[other]

    def set_row(self, tensor: int, size: int, dtype: torch.dtype) -> None:
        """Makes a tensor a row of elements."""
        key = size, dtype
        if key not in self._rows:
            value = self._rows[key] = self._first_row + len(self._rows)
            self.layouts[value] = StridedLayout((size,), (1,), 0, dtype)
        self.values[tensor], self.parts[tensor] = self._rows[key], None

    def clear(self, tensor: int) -> None:
        """Takes the content of a tensor away."""
        self.values[tensor], self.parts[tensor] = -1, None

    def memory_of(self, tensor: int) -> StridedLayout:
        """Returns the layout of a tensor's content in memory of its own."""
        part = self.parts[tensor]
        if part is None:
            return self.layouts[self.values[tensor]]
        return contiguous(part.size, part.dtype)

    def layout_of(self, weight: int) -> StridedLayout:
        """Returns the layout of a weight, a tensor of the program."""
        return self.program.layouts[self.program.tensor_values[weight]]

    def base(self, tensor: int) -> int:
        """Returns the tensor of the program that a tensor of it is a view of, or itself."""
        base = int(self.program.graph.view_of[tensor])
        return base if base >= 0 else tensor

    def is_source(self, tensor: int) -> bool:
        """Returns whether a tensor is a parameter, a buffer or an input."""
        return self.op_origin[self.step.producers[tensor]] in self.program.sources


def _tensors_by(ops: I64, tensors: I64, num_ops: int) -> list[list[int]]:
    """Returns those of `tensors` [E] that go with each op, from the op of each [E]."""
    ends = np.cumsum(np.bincount(ops, minlength=num_ops))
    return [part.tolist() for part in np.split(tensors[np.argsort(ops, kind="stable")], ends[:-1])]


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
        self._known: dict[tuple[int, int, int], ReplicaExchange] = {}
        self._exchange = exchange_of(tensors.step).tolist()
        self._turn = turn_in_exchange(tensors.step).tolist()
        self._is_hop = tensors.step.is_in_role(*HOPS).tolist()

    def make(self, op: int) -> Make:
        """Returns what makes an op of an exchange."""
        tensors, step = self.tensors, self.tensors.step
        role, replica = step.roles[op], int(step.replicas[op])
        key = self._exchange[op], int(step.microbatches[op]), replica
        if role == EXCHANGE_START:
            self._known[key] = self._begin(step.kinds[op].partition(".")[0], op, replica)
        exchange = self._known[key]
        sent = {tensor: self._sent(exchange, tensor) for tensor in tensors.made_by[op] if self._goes_round(tensor)}
        if role == EXCHANGE_START:
            return made(partial(exchange.ready, sent, self._results(exchange, op)))
        if role == EXCHANGE_END:
            return made(partial(exchange.done, self._results(exchange, op)))
        taken = None
        if role != HOST_RING_END:
            (tensor,) = tensors.with_bytes(tensors.read_by[op])
            taken = tensor, self._chunks(op)
        return made(partial(exchange.hop, taken, role in (RING_SUM, HOST_RING_SUM), sent))

    def _begin(self, kind: str, op: int, replica: int) -> ReplicaExchange:
        number, own = -1 - len(self._known), self.places.owned(replica)
        if kind == "all_gather":
            return self._gather(number, op, replica, own)
        tensors = self.tensors
        gradients = sorted(tensors.contents(op), key=self._order)
        if not self.zero:
            members = [Member(each, tensors.memory_of(each), is_alone=self._is_alone(each)) for each in gradients]
            cut = Cut.joined([numel(member.layout) for member in members], self.places.num_inner, self.places.num_outer)
            is_overwritten = any(tensors.values[gradient] in self._overwritten for gradient in gradients)
            return AllReduce(number, cut, _one_dtype(members), members, own, is_overwritten)
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
        rows = zip(gradients, layouts, updates, strict=True)
        members = [Member(each, layout, self._view_of(of[0]), self._is_alone(each)) for each, layout, of in rows]
        dtype = tensors.layouts[tensors.values[gradients[0]]].dtype
        return ReduceScatter(number, cut, dtype, members, own, is_in_place=self.zero == 1)

    def _gather(self, number: int, op: int, replica: int, own: int) -> WeightGather | ParameterGather:
        tensors = self.tensors
        if self.zero == 3:
            contents = sorted(tensors.contents(op), key=tensors.origin.__getitem__)
            members = [Member(tensor, tensors.layout_of(tensors.origin[tensor])) for tensor in contents]
            weights = [tensors.origin[member.tensor] for member in members]
            return ParameterGather(number, *self._gathered(members, weights), members, own)
        makers = {tensors.op_origin[int(tensors.step.producers[tensor])] for tensor in tensors.read_by[op]}
        weights = sorted(self.updates[maker].weight for maker in makers if maker in self.updates)
        members = [Member(kept_number(weight, replica), tensors.layout_of(weight)) for weight in weights]
        return WeightGather(number, *self._gathered(members, weights), members, own)

    def _gathered(self, members: Sequence[Member], weights: Sequence[int]) -> tuple[Cut, torch.dtype]:
        """Returns the cut and the type of a gather; weights of several types come together as bytes."""
        dtypes = {member.layout.dtype for member in members}
        if len(dtypes) == 1:
            return self.owned.gathered(weights, [1] * len(weights)), dtypes.pop()
        return self.owned.gathered(weights, [member.layout.dtype.itemsize for member in members]), torch.uint8

    def _results(self, exchange: RowExchange, op: int) -> Results:
        """Returns the tensors that the first or last op of an exchange makes of pieces or of gathered parameters."""
        if isinstance(exchange, ReduceScatter) and self.tensors.step.roles[op] == EXCHANGE_END:
            return self._pieces(exchange, op)
        return self._parameters(exchange, op) if isinstance(exchange, ParameterGather) else {}

    def _pieces(self, exchange: ReduceScatter, op: int) -> dict[int, tuple[int, Span]]:
        """Returns by tensor that `op` makes of the sum of a gradient: the member, and its elements."""
        results = {}
        made = {} if exchange.is_in_place else {self._reader(tensor): tensor for tensor in self._made(op)}
        for number, member in enumerate(exchange.members):
            first, last = exchange.cut.spans[number][exchange.own]
            tensor = member.tensor
            if not exchange.is_in_place:
                tensor = next(made[own.op] for own in self._updates_of(tensor) if own.op in made)
                self.tensors.set_row(tensor, last - first, exchange.dtype)
            results[tensor] = number, (first, last)
        return results

    def _made(self, op: int) -> list[int]:
        return self.tensors.with_bytes(self.tensors.made_by[op])

    def _reader(self, tensor: int) -> int:
        """Returns the first update, an op of the program, that reads a piece of a gradient after all sums."""
        step, op_origin = self.tensors.step, self.tensors.op_origin
        reader = int(step.consumers_of(tensor)[0])
        while op_origin[reader] < 0:
            (tensor,) = self._made(reader)
            reader = int(step.consumers_of(tensor)[0])
        return op_origin[reader]

    def _parameters(self, exchange: ParameterGather, op: int) -> dict[int, tuple[int, StridedLayout | None]]:
        """Returns by tensor that `op` makes of gathered parameters: the member, and the part of it."""
        tensors, program = self.tensors, self.tensors.program
        number = {tensors.origin[member.tensor]: place for place, member in enumerate(exchange.members)}
        own = set(tensors.made_by[op])
        found = {}
        for user in {int(user) for tensor in own for user in tensors.step.consumers_of(tensor)}:
            origin = tensors.op_origin[user]
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
        role, replica = self.tensors.step.roles[op], int(self.tensors.step.replicas[op])
        is_inside = role in (HOST_RING_SUM, HOST_RING_COPY)
        return self.places.taken(replica, self._turn[op], is_sum=role in (RING_SUM, HOST_RING_SUM), is_inside=is_inside)

    def _is_alone(self, gradient: int) -> bool:
        """Returns whether exchanges and updates alone read the memory of a gradient, so that its sum may be made there.
        Not where the value has several tensors, such as parts that may overlap, or is an output or a gradient that goes
        on through the backward pass."""
        tensors, step = self.tensors, self.tensors.step
        value, producer = tensors.values[gradient], int(step.producers[gradient])
        readers = step.consumers_of(gradient)
        of_value = [each for each in tensors.with_bytes(tensors.made_by[producer]) if tensors.values[each] == value]
        return (
            of_value == [gradient]
            and not step.is_kept[gradient]
            and not tensors.is_source(gradient)
            and value not in self._kept_values
            and all(step.is_collective[op] or step.phases[op] == "update" for op in readers.tolist())
        )


def made(function: Callable[[Held, Device], dict[int, Any]]) -> Make:
    """Returns what makes a routine of a function of what is held and the device."""
    return partial(MadeRoutine, function)


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
