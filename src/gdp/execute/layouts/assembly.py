"""Assembly: the tensors of a cut step, and the ops that its layout adds or changes. Ops are taken in their order, so
that an exchange is known by its first op when its hops come, and a gradient by its last sum when an update reads it."""

from functools import partial
from typing import Any

import torch

from gdp.errors import InputError
from gdp.execute.layouts.cut import Cut, Ownership, Pieces, RingPlaces
from gdp.execute.layouts.exchange_routines import Device, Held, Member
from gdp.execute.layouts.exchanges import Exchanges, Make, StepTensors, kept_number, made
from gdp.execute.layouts.updates import Update, UpdateOfPiece, check_whole, updates_of
from gdp.graph import Graph
from gdp.models.pytorch import Program
from gdp.models.pytorch.optimizers import numel
from gdp.parallel.rings import READY
from gdp.parallel.step import DONE as BATCH_DONE


class Assembly:
    """The tensors and made ops of `step`, whose copies are of `program`."""

    def __init__(self, program: Program, step: Graph, places: RingPlaces, zero: int) -> None:
        self.program, self.step, self.zero = program, step, zero
        self.tensors = StepTensors(program, step)
        self.updates = updates_of(program)
        self.owned = Ownership(places)
        self.made: dict[int, Make] = {}  # by op
        if zero == 3:
            self._cut_parameters()
        exchanges = Exchanges(self.tensors, self.owned, self.updates, zero)
        is_exchange = step.is_collective.tolist()
        for op, origin in enumerate(self.tensors.op_origin):
            if is_exchange[op]:
                self.made[op] = exchanges.make(op)
            elif step.kinds[op] == BATCH_DONE:
                self.made[op] = made(lambda held, device: {})  # it only waits
            elif origin < 0:
                self._add_sum(op)
            elif zero and step.phases[op] == "update":
                self._add_update(op, origin)

    def gradient_of(self, op: int, update: Update) -> int:
        """Returns the tensor of the gradient that the copy `op` of an update reads."""
        tensors = self.tensors
        (gradient,) = (tensor for tensor in tensors.contents(op) if not tensors.is_source(tensor))
        return gradient

    def parameter_pieces(self) -> dict[int, Pieces]:
        """Returns the parameters that are cut, by tensor of the program."""
        if self.zero < 3:
            return {}
        found: dict[int, Pieces] = {}
        for tensor, origin in enumerate(self.tensors.origin):
            if origin in self.owned:
                pieces = found.setdefault(origin, Pieces({}, self.tensors.layout_of(origin)))
                pieces.spans[tensor] = self.owned.piece(origin, self._replica(tensor))
        return found

    def _replica(self, tensor: int) -> int:
        return int(self.step.replicas[self.step.producers[tensor]])

    def _cut_parameters(self) -> None:
        """Makes parameters of all replicas pieces: those that the first ops of gathers read."""
        tensors, num_replicas = self.tensors, self.owned.places.num_replicas
        for op, kind in enumerate(self.step.kinds):
            if kind == f"all_gather.{READY}" and not self.step.replicas[op]:
                for tensor in tensors.contents(op):
                    weight = self.tensors.origin[tensor]
                    layout = tensors.layout_of(weight)
                    check_whole(self.program, weight, self.step.op_names[int(self.step.producers[tensor])], self.zero)
                    self.owned.cut(weight, Cut.each([numel(layout)], num_replicas).spans[0])
        for tensor, origin in enumerate(self.tensors.origin):
            if origin in self.owned:
                first, last = self.owned.piece(origin, self._replica(tensor))
                tensors.set_row(tensor, last - first, tensors.layout_of(origin).dtype)
            elif origin >= 0 and tensors.base(origin) in self.owned:
                tensors.clear(tensor)

    def _add_sum(self, op: int) -> None:
        tensors, step = self.tensors, self.step
        before, gradient = tensors.contents(op)
        sums = [tensor for tensor in (before, gradient) if self.tensors.op_origin[int(step.producers[tensor])] < 0]
        if gradient in sums and before not in sums:
            before, gradient = gradient, before
        is_exchanged = bool(step.is_collective[step.producers[before]])
        is_in_place = before in sums and not is_exchanged and len(step.consumers_of(before)) == 1
        (result,) = tensors.with_bytes(tensors.made_by[op])
        tensors.copy_value(result, gradient)
        self.made[op] = made(partial(_added, before, gradient, result, is_in_place))

    def _add_update(self, op: int, origin: int) -> None:
        update, program = self.updates.get(origin), self.program
        if update is None:
            raise InputError(
                f"zero={self.zero}: {self.step.op_names[op]!r} is no update of one parameter by one gradient, so it "
                "cannot be cut; place with zero=0"
            )
        update.check_alone(program, self.zero)
        replica, is_cut = int(self.step.replicas[op]), self.zero == 3
        (weight,) = (tensor for tensor in self.tensors.contents(op) if self.tensors.origin[tensor] == update.weight)
        weight_value = program.tensor_values[update.weight]
        self.made[op] = UpdateOfPiece(
            program.calls[update.op],
            Member(weight, update.layout),
            weight_value,
            self.gradient_of(op, update),
            update.gradient[0],
            {value: program.layouts[value] for value in program.private.get(update.op, ())},
            frozenset(value for value, ref in program.state_copies.items() if ref.value == weight_value),
            self.owned.piece(update.weight, replica),
            is_cut,
            None if is_cut else kept_number(update.weight, replica),
        )


def _added(before: int, gradient: int, result: int, is_in_place: bool, held: Held, device: Device) -> dict[int, Any]:
    """Adds the gradient of one more micro-batch; `is_in_place`: `before` is a sum that nothing else reads."""
    if is_in_place:
        return {result: held[before].add_(held[gradient])}
    # as the gradient lies in memory: each may have come as a compact copy
    return {result: torch.add(held[before], held[gradient])}
