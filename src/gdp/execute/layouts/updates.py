"""Updates of a program: which weight each one writes, from which gradient, and whether it treats each element alone."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gdp.errors import InputError
from gdp.models.pytorch import Program
from gdp.models.pytorch.recorded_calls import Ref
from gdp.models.pytorch.strides import StridedLayout, is_dense

aten = torch.ops.aten
Content = tuple[int, StridedLayout | None]
"""A value, and the part of it that a tensor has."""

_ALONE = frozenset(
    {
        aten._fused_adam_.default,
        aten._fused_adamw_.default,
        aten._fused_sgd_.default,
        aten.add_.Tensor,
        aten._to_copy.default,
        aten.copy_.default,
    }
)
"""Kernels of updates that treat each element alone."""


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
        odd = next((call.func for call in program.calls[self.op] if call.func not in _ALONE), None)
        if odd is not None:
            raise InputError(
                f"zero={zero}: an optimizer with {odd} needs whole parameters, and each replica updates a piece; place "
                "with zero=0, or with --optimizer adam, adamw, sgd or sgd-momentum"
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


def refs(item: Any) -> Iterator[Ref]:
    """Yields the references in the arguments of a call."""
    if type(item) is Ref:
        yield item
    elif isinstance(item, Mapping):
        yield from refs(list(item.values()))
    elif isinstance(item, (list, tuple)):
        for part in item:
            yield from refs(part)
