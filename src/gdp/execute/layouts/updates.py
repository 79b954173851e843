"""Updates: which weight each one writes, from which gradient, and the updates of pieces that replicas own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from gdp.errors import InputError
from gdp.execute.layouts.cut import Span
from gdp.execute.layouts.exchange_routines import Held, Member
from gdp.models.pytorch import Program
from gdp.models.pytorch.recorded_calls import Call, Ref
from gdp.models.pytorch.replacements import function_for
from gdp.models.pytorch.routine import leaves
from gdp.models.pytorch.strides import StridedLayout, is_dense

aten = torch.ops.aten
Content = tuple[int, StridedLayout | None]  # a value, and the part of it that a tensor has

FUSED = frozenset({aten._fused_adam_.default, aten._fused_adamw_.default, aten._fused_sgd_.default})
"""Kernels of updates that do nothing if they are told of an overflow."""
_ALONE = FUSED | {aten.add_.Tensor, aten._to_copy.default, aten.copy_.default}  # that treat each element alone


@dataclass(frozen=True, slots=True)
class Update:
    """The update of one parameter, an op of a program."""

    op: int
    name: str  # of the parameter
    weight: int  # the tensor
    gradient: Content  # of the tensor that it reads
    view: StridedLayout | None  # of the gradient, as it reads it
    layout: StridedLayout  # of the weight

    def check_alone(self, program: Program, zero: int) -> None:
        """Raises InputError unless a piece of the parameter can be updated without the others."""
        check_whole(program, self.weight, self.name, zero)
        self.check_elementwise(program, f"zero={zero}", "replica", "with zero=0")

    def check_elementwise(self, program: Program, layout: str, owner: str, remedy: str) -> None:
        """Raises InputError unless it treats each element of the parameter alone."""
        odd = next((call.func for call in program.calls[self.op] if call.func not in _ALONE), None)
        if odd is not None:
            raise InputError(
                f"{layout}: an optimizer with {odd} needs whole parameters, and each {owner} updates a piece; place "
                f"{remedy}, or with --optimizer adam, adamw, sgd or sgd-momentum"
            )


def check_whole(program: Program, weight: int, name: str, zero: int) -> None:
    """Raises InputError where the parameter of the tensor `weight` is not all of a dense memory, which can be cut."""
    layout = program.layouts[program.tensor_values[weight]]
    views = program.sources[int(program.graph.producers[weight])].views.values()
    if not is_dense(layout) or any((view.size, view.stride) != (layout.size, layout.stride) for view in views):
        raise InputError(
            f"zero={zero}: parameter {name!r} has gaps in its memory, or shares it with another; place with zero=0"
        )


def updates_of(program: Program) -> dict[int, Update]:
    """Returns the updates of parameters by op."""
    names = {ref.value: name for name, ref in program.gradients.items()}
    found = {}
    for op, phase in enumerate(program.graph.phases):
        if phase != "update" or not program.calls[op]:
            continue
        sources = {tensor for tensor in program.inputs_of[op] if _is_parameter(program, tensor)}
        gradients = [tensor for tensor in program.inputs_of[op] if program.tensor_values[tensor] in names]
        if len(sources) != 1 or len(gradients) != 1:
            continue
        (weight,), (gradient,) = sources, gradients
        if program.tensor_layouts[weight] is not None:
            continue
        value, part = program.tensor_values[gradient], program.tensor_layouts[gradient]
        view = next(
            ref.layout for call in program.calls[op] for ref in refs((call.args, call.kwargs)) if ref.value == value
        )
        layout = program.layouts[program.tensor_values[weight]]
        found[op] = Update(op, program.updated.get(op, program.graph.op_names[op]), weight, (value, part), view, layout)
    return found


def _is_parameter(program: Program, tensor: int) -> bool:
    source = program.sources.get(int(program.graph.producers[tensor]))
    return source is not None and source.kind == "parameter"


def refs(arguments: Any) -> list[Ref]:
    """Returns the references in the arguments of calls."""
    return [item for item in tree_leaves(arguments) if isinstance(item, Ref)]


@dataclass(frozen=True, slots=True)
class UpdateOfPiece:
    """The calls of an update, and the piece of a parameter that they are made on; makes the routine for a device."""

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
    scale: int | None = None  # a tensor that the gradient is multiplied by
    overflow: int | None = None  # a tensor that tells whether the update is left out

    def __call__(self, device: torch.device | None) -> "PieceUpdate":
        return PieceUpdate(self, device)


class PieceUpdate:
    """An update of the piece of a parameter that a replica owns, by kernels that treat each element alone."""

    def __init__(self, update: UpdateOfPiece, device: torch.device | None) -> None:
        self._update = update
        self._calls = [(function_for(call.func, device), call.args, dict(call.kwargs), call) for call in update.calls]

    def run(self, held: Held, private: Held, seed: int = 0) -> dict[int, Any]:
        """Executes the update; see `Program.run`."""
        update = self._update
        first, last = update.piece
        weight = held[update.weight.tensor]
        if last > first:
            row = weight if update.is_cut else update.weight.row(weight)[first:last]
            self._begin(row, private)
            if update.overflow is None or not held[update.overflow]:
                self._update_row(row, held, private)
        return {} if update.kept is None else {update.kept: weight}

    def _begin(self, row: Tensor, private: Held) -> None:
        """Makes the state of the piece `row`, if it has none yet."""
        for value, layout in self._update.state.items():
            if value not in private:
                private[value] = torch.zeros(layout.size and row.shape, dtype=layout.dtype, device=row.device)
                if value in self._update.copies:
                    private[value].copy_(row)

    def _update_row(self, row: Tensor, held: Held, private: Held) -> None:
        update = self._update
        gradient = held[update.gradient]
        if update.scale is not None:
            gradient = gradient * held[update.scale]
        values = {update.weight_value: row, update.gradient_value: gradient}
        values |= {value: private[value] for value in update.state}
        for function, args, kwargs, call in self._calls:
            result = function(*(_filled(item, values) for item in args), **_filled(kwargs, values))
            values |= {new: values[old] for old, new in call.writes}
            made = zip(call.outputs, leaves(result), strict=False)
            values |= {value: tensor for value, tensor in made if value >= 0 and tensor is not None}

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
