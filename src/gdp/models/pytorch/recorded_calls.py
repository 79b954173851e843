"""A recorded call of an operator, and its arguments in terms of values: the contents of memory between two writes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch._ops import OpOverload

from gdp.models.pytorch.strides import StridedLayout


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument: a value as its op made it (`layout` None), or a view of it."""

    value: int
    layout: StridedLayout | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """One recorded call of an operator; tensors in `args` and `kwargs` are `Ref`s, also inside lists and tuples."""

    func: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[int, ...] = ()  # the value of each tensor returned; -1: none, or memory that is known already
    writes: tuple[tuple[int, int], ...] = ()  # (value overwritten, value that its memory holds from then on)
    seed: int = -1  # of the random generator; -1: draws nothing
    part: int = 0  # of a cut tensor, in which the ranks of a group draw numbers of their own
    is_grad_enabled: bool = False  # some kernels save tensors for their backward pass only if true (mkldnn_rnn_layer)
