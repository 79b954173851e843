"""Routines of the ops that a layout adds or changes on one device: random numbers, sums, updates of pieces."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gdp.execute.layouts.cut import Span
from gdp.execute.layouts.exchange_routines import Held, MadeRoutine, Member
from gdp.models.pytorch.recorded_calls import Call, Ref
from gdp.models.pytorch.replacements import function_for
from gdp.models.pytorch.routine import leaves
from gdp.models.pytorch.strides import StridedLayout


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
class UpdateOfPiece:
    """The calls of an update, and the piece of a parameter that they are made on."""

    calls: Sequence[Call]  # of the update of the whole parameter
    weight: Member
    weight_value: int
    gradient: int  # the tensor of the piece
    gradient_value: int
    state: Mapping[int, StridedLayout]  # by value
    copies: frozenset[int]  # the values that begin as copies of the weight
    piece: Span
    is_cut: bool  # the tensor of the weight is the piece
    kept: int | None  # the number that the weight is held by until it is gathered


class PieceUpdate:
    """An update of the piece of a parameter that a replica owns, by kernels that treat each element alone."""

    def __init__(self, update: UpdateOfPiece, device: torch.device | None) -> None:
        self._update, self._device = update, device
        self._calls = [(function_for(call.func, device), call.args, dict(call.kwargs), call) for call in update.calls]

    def run(self, held: Held, private: Held, seed: int = 0) -> dict[int, Any]:
        """Executes the update; see `Program.run`."""
        update = self._update
        first, last = update.piece
        weight = held[update.weight.tensor]
        row = weight if update.is_cut else update.weight.row(weight)[first:last]
        if last > first:
            self._begin(row, private)
            values = {update.weight_value: row, update.gradient_value: held[update.gradient]}
            values |= {value: private[value] for value in update.state}
            for function, args, kwargs, call in self._calls:
                result = function(*(_filled(item, values) for item in args), **_filled(kwargs, values))
                values |= {new: values[old] for old, new in call.writes}
                made = zip(call.outputs, leaves(result), strict=False)
                values |= {value: tensor for value, tensor in made if value >= 0 and tensor is not None}
        return {} if update.kept is None else {update.kept: weight}

    def leave_out(self, held: Held, private: Held) -> dict[int, Any]:
        """Returns what `run` does, with the parameter and its state as they are."""
        update = self._update
        first, last = update.piece
        weight = held[update.weight.tensor]
        if last > first:
            self._begin(weight if update.is_cut else update.weight.row(weight)[first:last], private)
        return {} if update.kept is None else {update.kept: weight}

    def _begin(self, row: Tensor, private: Held) -> None:
        """Makes the state of the piece `row`, if it has none yet."""
        for value, layout in self._update.state.items():
            if value not in private:
                private[value] = torch.zeros(layout.size and row.shape, dtype=layout.dtype, device=row.device)
                if value in self._update.copies:
                    private[value].copy_(row)

    def set_keyword(self, key: str, value: Any) -> None:
        """Changes a constant argument, such as the learning rate, of the calls that have it."""
        for _, _, kwargs, _ in self._calls:
            if key in kwargs:
                kwargs[key] = value


def _filled(item: Any, values: Mapping[int, Tensor]) -> Any:
    """Returns an argument with tensors in place of references."""
    if type(item) is Ref:
        return values[item.value]
    if type(item) in (tuple, list):
        return type(item)(_filled(part, values) for part in item)
    return {key: _filled(part, values) for key, part in item.items()} if type(item) is dict else item
