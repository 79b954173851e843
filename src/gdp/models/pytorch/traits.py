"""An operator's treatment of memory and random numbers, from its schema, its tags and a few tables."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from gdp.models.pytorch.bytes_accessed import NO_BYTES
from gdp.models.pytorch.routine import leaves

aten = torch.ops.aten

LIFTS = (aten.lift_fresh.default, aten.lift_fresh_copy.default, aten.lift.default)
"""What `torch.tensor` dispatches to with the content."""

MATERIALISED = {aten._conj.default: aten._conj_physical.default, aten._neg_view.default: aten.neg.default}
"""Views that are more than a layout, and the operators recorded for them."""

# (running mean, running variance) and the argument that says whether they are updated: the schemas do not tell
_HIDDEN_WRITES = {aten.native_batch_norm.default: ((3, 4), 5), aten.cudnn_batch_norm.default: ((3, 4), 5)}

# operators that read only the shape of a tensor: what fills the new one, and with what (None: the call's last argument)
_FILLS: dict[str, tuple[OpOverload | None, int | None]] = {
    **dict.fromkeys(("empty_like", "new_empty", "new_empty_strided"), (None, None)),
    **dict.fromkeys(("zeros_like", "new_zeros"), (aten.fill_.Scalar, 0)),
    **dict.fromkeys(("ones_like", "new_ones"), (aten.fill_.Scalar, 1)),
    **dict.fromkeys(("full_like", "new_full"), (aten.fill_.Scalar, None)),
    "rand_like": (aten.uniform_.default, None),
    "randn_like": (aten.normal_.default, None),
}

BLANKS = {f"aten.{name}" for name in (*NO_BYTES, *_FILLS, "zeros", "ones", "full")}
"""Kinds of ops that only make memory for another to write to."""


@dataclass(frozen=True, slots=True)
class Traits:
    """The treatment of memory and random numbers by an operator, determined once per operator."""

    kind: str
    is_view: bool  # makes no content: a view, or an in-place change of shape
    writes: tuple[int | str, ...]  # positions or names of arguments
    hidden_writes: tuple[tuple[int, ...], int]  # positions of more, written if the argument at the last is true
    is_random: bool
    dropout: int  # position of the argument `dropout_p`, at 0 of which nothing is drawn; -1 none
    reads_shape_only: bool
    fill: OpOverload | None  # of the memory that a reader of a shape makes
    content: int | None

    def written(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The tensors among the arguments that the call writes to."""
        written: list[Tensor | None] = []
        for where in self.writes:
            if isinstance(where, str):
                written.extend(leaves(kwargs.get(where)))
            elif where < len(args):
                written.extend(leaves(args[where]))
        positions, condition = self.hidden_writes
        if positions and args[condition]:
            written.extend(args[position] for position in positions)
        return [tensor for tensor in written if tensor is not None]

    def draws(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Does the call draw random numbers?"""
        return self.is_random and (self.dropout < 0 or self._drops(args, kwargs))

    def draws_again(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Does the call, of a backward pass, draw the random numbers of the forward pass once more?"""
        return not self.is_random and self.dropout >= 0 and self._drops(args, kwargs)

    def _drops(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        return bool(args[self.dropout] if self.dropout < len(args) else kwargs.get("dropout_p"))


@cache
def traits_of(func: OpOverload) -> Traits:
    """The traits of `func`."""
    name, arguments = func._schema.name, func._schema.arguments
    writes: list[int | str] = []
    for position, argument in enumerate(arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            writes.append(argument.name if argument.kwarg_only else position)
    names = [argument.name for argument in arguments]
    short = name.removeprefix("aten::")
    fill, content = _FILLS.get(short, (None, None))
    return Traits(
        kind=name.replace("::", "."),
        is_view=torch.Tag.inplace_view in func.tags or (func.is_view and not writes),
        writes=tuple(writes),
        hidden_writes=_HIDDEN_WRITES.get(func, ((), 0)),
        is_random=torch.Tag.nondeterministic_seeded in func.tags,
        dropout=names.index("dropout_p") if "dropout_p" in names else -1,
        reads_shape_only=short in _FILLS,
        fill=fill,
        content=content,
    )
