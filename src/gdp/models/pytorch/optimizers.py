"""The update of one parameter, by PyTorch's fused kernels with the defaults of `torch.optim`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from gdp.models.pytorch.program import Call, Ref

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Optimizer:
    """The update of a parameter. `calls(weight, gradient, state)`: the state is moments like the weight, then a step
    count.
    """

    kind: str
    num_moments: int
    flops_per_element: int
    passes: int  # over memory of the parameter's size, reading or writing
    calls: Callable[[Ref, Ref, list[Ref]], list[Call]]


def _adam_calls(weight: Ref, gradient: Ref, state: list[Ref]) -> list[Call]:
    mean, square, count = state
    options = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.0, "eps": 1e-8}
    options |= {"amsgrad": False, "maximize": False}
    return [
        Call(aten.add_.Tensor, (count, 1), {}, (-1,)),
        Call(aten._fused_adam_.default, ([weight], [gradient], [mean], [square], [], [count]), options, (-1,)),
    ]


def _sgd_calls(weight: Ref, gradient: Ref, state: list[Ref]) -> list[Call]:
    options = {"weight_decay": 0.0, "momentum": 0.0, "lr": 1e-3, "dampening": 0.0}
    switches = {"nesterov": False, "maximize": False, "is_first_step": True}
    return [Call(aten._fused_sgd_.default, ([weight], [gradient], []), options | switches, (-1,))]


OPTIMIZERS: Mapping[str, Optimizer] = MappingProxyType(
    {
        # mean m + a (g - m) 3; square b v + (1 - b) g g 4; root, over correction, plus eps 3; divide, scale, subtract 3
        "adam": Optimizer("aten._fused_adam_", num_moments=2, flops_per_element=13, passes=7, calls=_adam_calls),
        "sgd": Optimizer("aten._fused_sgd_", num_moments=0, flops_per_element=2, passes=3, calls=_sgd_calls),
    }
)
