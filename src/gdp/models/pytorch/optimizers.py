"""The update of one parameter: state, work, and PyTorch's own kernels that compute it. Adam, AdamW and SGD are one
fused kernel where they are executed, and cost what their implementation in `torch.optim` does: `foreach`, its default
on cards, `fused` or `for-loop`; Adafactor is `torch.optim.Adafactor`, one parameter at a time. Adam in 8 bits is that
of bitsandbytes, whose kernels are counted but cannot be run here. With master weights the state and the arithmetic are
float32, and the parameter is a rounded copy."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.optim._adafactor import adafactor

from gdp.errors import InputError
from gdp.graph.shapes import call_text
from gdp.models.model import IMPLEMENTATIONS
from gdp.models.pytorch.recorded_calls import Call, Ref
from gdp.models.pytorch.strides import StridedLayout, contiguous

aten = torch.ops.aten
Widened = Callable[[], int]  # a function that makes a new value, for a float32 copy of the gradient

HALF = (torch.bfloat16, torch.float16)  # the types of parameters that have a float32 master copy

COUNT = "step"
MASTER = "master"


@dataclass(frozen=True, slots=True)
class StatePart:
    """A tensor that an optimizer keeps for a parameter: zero before the first step, or a copy of the parameter."""

    key: str  # as in the state of `torch.optim`
    layout: StridedLayout
    is_copy: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor; the number of steps taken is left out."""
        return 0 if self.key == COUNT else num_bytes(self.layout)


_STEPS_TAKEN = StatePart(COUNT, StridedLayout((), (), 0, torch.float32))


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRule:
    """An optimizer's treatment of a parameter. The base class is plain SGD."""

    name: str
    kind: str = "aten._fused_sgd_"  # of the ops
    options: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments of the kernel
    implementation: str = IMPLEMENTATIONS[0]

    def state(self, weight: StridedLayout) -> list[StatePart]:
        """Returns the tensors kept for a parameter, in the order that `calls` takes them."""
        return [StatePart("momentum_buffer", dense(weight))] if self.options["momentum"] else []

    def flops(self, weight: StridedLayout) -> int:
        """Returns the floating point operations of an update."""
        # scale, subtract; momentum: scale, add; Nesterov: scale, add; decay: scale, add
        extras = sum(bool(self.options[key]) for key in ("momentum", "nesterov", "weight_decay"))
        return (2 + 2 * extras) * numel(weight)

    def bytes_accessed(self, weight: StridedLayout, gradient: StridedLayout) -> int:
        """Returns the bytes of an update: weight and state are read and written once, the gradient is read."""
        return num_bytes(gradient) + 2 * num_bytes(weight) + 2 * sum(part.num_bytes for part in self.state(weight))

    def calls(self, weight: Ref, gradient: Ref, state: Sequence[Ref], widened: Widened) -> list[Call]:
        """Returns the calls of an update; the last one writes the weight."""
        options = {**self.options, "is_first_step": not state}
        return [Call(aten._fused_sgd_.default, ([weight], [gradient], list(state)), options, (-1,))]

    def passes(self) -> list[str]:
        """Returns the calls of an implementation of torch.optim that is not fused, as the tensors that each moves. w is
        the weight, g the gradient, s a part of the state and t a result that is not kept."""
        calls = ["gwt"] * bool(self.options["weight_decay"])
        if self.options["momentum"]:
            calls += ["ss", "sgs", *["gst"] * bool(self.options["nesterov"])]
        return [*calls, "wgw"]

    def shapes(self, weight: StridedLayout, gradient: StridedLayout) -> str:
        """Returns what the implementation moves, as graphs carry it: bytes, those of one kernel, calls, kernels."""
        once, calls = self.bytes_accessed(weight, gradient), self.passes()
        moved, count = once, 1
        if calls and self.implementation != "fused":
            tensors = "".join(calls)
            moved = tensors.count("g") * num_bytes(gradient) + sum(map(tensors.count, "wst")) * num_bytes(weight)
            count = len(calls)
        return call_text(f"optimizer.{self.implementation}", (moved, once, count), ())

    @property
    def refusal(self) -> str:
        """Returns why the update cannot be executed; "" if it can be."""
        if self.options.get("momentum") and self.options.get("dampening"):
            return "the first step of SGD with dampening differs from all others, and an op has one form"
        return ""


class AdamRule(UpdateRule):
    """Adam and AdamW."""

    __slots__ = ()

    def state(self, weight: StridedLayout) -> list[StatePart]:
        """Returns two moments, with AMSGrad the largest second one, and the number of steps."""
        keys = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * bool(self.options["amsgrad"])
        return [*(StatePart(key, dense(weight)) for key in keys), _STEPS_TAKEN]

    def flops(self, weight: StridedLayout) -> int:
        """Returns 13 for each element, 2 more with weight decay, 1 more with AMSGrad."""
        # mean m + a (g - m) 3; square b v + (1 - b) g g 4; root, over correction, plus eps 3; divide, scale, subtract 3
        return (13 + 2 * bool(self.options["weight_decay"]) + bool(self.options["amsgrad"])) * numel(weight)

    def passes(self) -> list[str]:
        """Returns decay, mean, square, its root with correction and epsilon, and the step."""
        decay = "ww" if self.kind == "aten._fused_adamw_" else "gwt"
        largest = ["sss"] * bool(self.options["amsgrad"])
        return [*[decay] * bool(self.options["weight_decay"]), "sgs", "ss", "sgs", *largest, "st", "tt", "tt", "wstw"]

    def calls(self, weight: Ref, gradient: Ref, state: Sequence[Ref], widened: Widened) -> list[Call]:
        """Returns PyTorch's fused kernel, behind the count of steps."""
        mean, square, *largest, count = state
        function = aten._fused_adamw_.default if self.kind == "aten._fused_adamw_" else aten._fused_adam_.default
        lists = ([weight], [gradient], [mean], [square], largest, [count])
        return [Call(aten.add_.Tensor, (count, 1), {}, (-1,)), Call(function, lists, dict(self.options), (-1,))]


class AdafactorRule(UpdateRule):
    """Adafactor: a vector for the rows and one for the columns instead of a second moment of each element."""

    __slots__ = ()

    def state(self, weight: StridedLayout) -> list[StatePart]:
        """Returns row and column factors of matrices, and of stacks of matrices; the second moment of vectors."""
        if not _is_matrix(weight):
            return [StatePart("variance", dense(weight)), _STEPS_TAKEN]
        *stack, rows, columns = weight.size
        factors = {"row_var": (*stack, rows, 1), "col_var": (*stack, 1, columns)}
        return [*(StatePart(key, contiguous(size, weight.dtype)) for key, size in factors.items()), _STEPS_TAKEN]

    def flops(self, weight: StridedLayout) -> int:
        """Returns 15 for each element of a matrix, 13 of a vector; factors are left out."""
        # norms of weight, rows, columns and update 8; outer product 2; clamp, root, scale 3; scale, add 2
        # or norms of weight and update 4; square 1; average 3; clamp, root, scale 3; scale, add 2
        decay = 2 if self.options["weight_decay"] else 0
        return ((15 if _is_matrix(weight) else 13) + decay) * numel(weight)

    def bytes_accessed(self, weight: StridedLayout, gradient: StridedLayout) -> int:
        """Returns the bytes of PyTorch's loop, in passes over memory of the parameter's size; factors are left out."""
        # read the weight 1, the gradient 2; outer product 1; clamp 2, root 2, scale 3, norm 1, add 3
        # or read the weight 1; square 2; average 3, copy 2; clamp 2, root 2, scale 3, norm 1, add 3
        own, of_gradient = (12, 3) if _is_matrix(weight) else (17, 2)
        own += 2 if self.options["weight_decay"] else 0
        return own * num_bytes(weight) + of_gradient * num_bytes(gradient)

    def shapes(self, weight: StridedLayout, gradient: StridedLayout) -> str:
        """Returns the bytes of PyTorch's loop and its kernels, two of which bring a number to the host."""
        once = self.bytes_accessed(weight, gradient)
        return call_text("optimizer.for-loop", (once, once, 20 if _is_matrix(weight) else 11), ())

    def calls(self, weight: Ref, gradient: Ref, state: Sequence[Ref], widened: Widened) -> list[Call]:
        """Returns PyTorch's own function."""
        options = {key: value for key, value in self.options.items() if key != "maximize"}
        return [Call(torch.ops.gdp.adafactor_.default, (weight, gradient, list(state)), options, (-1,))]

    @property
    def refusal(self) -> str:
        """Returns why the update cannot be executed; "" if it can be."""
        return "Adafactor with maximize=True is counted, not run" if self.options["maximize"] else ""


class EightBitAdamRule(UpdateRule):
    """Adam of bitsandbytes with moments in 8 bits, one float32 scale for each block. Parameters of fewer than 4,096
    elements keep float32 moments (`min_8bit_size` of bitsandbytes.optim.Adam8bit)."""

    __slots__ = ()

    def state(self, weight: StridedLayout) -> list[StatePart]:
        """Returns two moments and their scales."""
        if numel(weight) < _MIN_8BIT_ELEMENTS:
            return [StatePart(key, dense(weight._replace(dtype=torch.float32))) for key in ("state1", "state2")]
        scales = contiguous((math.ceil(numel(weight) / _BLOCK_ELEMENTS),), torch.float32)
        moments = [StatePart(key, dense(weight._replace(dtype=torch.uint8))) for key in ("state1", "state2")]
        return [*moments, StatePart("absmax1", scales), StatePart("absmax2", scales)]

    def flops(self, weight: StridedLayout) -> int:
        """Returns the FLOPs of Adam, and for each moment a product to read it, a maximum and a quotient to write it."""
        quantising = 6 if numel(weight) >= _MIN_8BIT_ELEMENTS else 0
        return (13 + 2 * bool(self.options["weight_decay"]) + quantising) * numel(weight)

    def shapes(self, weight: StridedLayout, gradient: StridedLayout) -> str:
        """Returns nothing: it is one kernel."""
        return ""

    def calls(self, weight: Ref, gradient: Ref, state: Sequence[Ref], widened: Widened) -> list[Call]:
        """Returns an update that fails: the kernel is not PyTorch's."""
        return [Call(torch.ops.gdp.eight_bit_adam_.default, (weight, gradient, list(state)), dict(self.options), (-1,))]

    @property
    def refusal(self) -> str:
        """Returns the reason: bitsandbytes' kernels are not PyTorch's."""
        return f"{self.name} is computed by kernels of bitsandbytes, which gdp counts but does not run"


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterWeights(UpdateRule):
    """A rule applied to a float32 copy of a parameter in half precision, which is rounded to the parameter afterwards.
    Counted as one kernel that reads and writes the copy in place of the parameter, and writes the parameter."""

    rule: UpdateRule

    @property
    def refusal(self) -> str:
        """Returns why the update cannot be executed; "" if it can be."""
        return self.rule.refusal

    def state(self, weight: StridedLayout) -> list[StatePart]:
        """Returns the copy, then the state of the rule for a float32 parameter."""
        master = dense(weight._replace(dtype=torch.float32))
        return [StatePart(MASTER, master, is_copy=True), *self.rule.state(master)]

    def flops(self, weight: StridedLayout) -> int:
        """Returns the operations of the rule, and two conversions."""
        return self.rule.flops(weight) + 2 * numel(weight)

    def bytes_accessed(self, weight: StridedLayout, gradient: StridedLayout) -> int:
        """Returns the bytes of the rule on the copy, and those of the parameter written."""
        return self.rule.bytes_accessed(weight._replace(dtype=torch.float32), gradient) + num_bytes(weight)

    def shapes(self, weight: StridedLayout, gradient: StridedLayout) -> str:
        """Returns those of the rule on the copy, whose parameter is written beside."""
        return self.rule.shapes(weight._replace(dtype=torch.float32), gradient)

    def calls(self, weight: Ref, gradient: Ref, state: Sequence[Ref], widened: Widened) -> list[Call]:
        """Returns the calls of the rule on the copy, between a wider gradient and a narrower weight."""
        master, *others = state
        wide = widened()
        return [
            Call(aten._to_copy.default, (gradient,), {"dtype": torch.float32}, (wide,)),
            *self.rule.calls(master, Ref(wide), others, widened),
            Call(aten.copy_.default, (weight, master), {}, (-1,)),
        ]


def _is_matrix(weight: StridedLayout) -> bool:
    return len(weight.size) > 1


def dense(layout: StridedLayout) -> StridedLayout:
    """Returns `layout` at the start of memory of its own."""
    return layout._replace(offset=0)


def numel(layout: StridedLayout) -> int:
    """Returns the number of elements."""
    return math.prod(layout.size)


def num_bytes(layout: StridedLayout) -> int:
    """Returns the bytes of the elements."""
    return numel(layout) * layout.dtype.itemsize


def named_rule(name: str, *, master_weights: bool) -> Callable[[str, Tensor], UpdateRule]:
    """Returns the rule of each parameter, by its path and itself, for the optimizer of that text of `--optimizer`."""
    name, _, implementation = name.partition(",")
    rule = OPTIMIZERS[name]
    rule = replace(rule, implementation=implementation or rule.implementation)
    masters = MasterWeights(name=f"{name} with float32 master weights", kind=rule.kind, rule=rule)
    return lambda _path, parameter: masters if master_weights and parameter.dtype in HALF else rule


def rule_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> UpdateRule | None:
    """Returns the rule of a group of parameters of a user's optimizer; None for a class without one."""
    kind = type(optimizer)
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        beta1, beta2 = map(float, group["betas"])
        options = {key: group[key] for key in _ADAM_DEFAULTS.keys() & group.keys()}
        options |= {"lr": float(group["lr"]), "beta1": beta1, "beta2": beta2}
        is_decoupled = kind is torch.optim.AdamW or bool(group.get("decoupled_weight_decay"))
        adam = _adam(kind.__name__, is_decoupled=is_decoupled, **options)
        return replace(adam, implementation=_implementation(group))
    if kind is torch.optim.SGD:
        options = {key: group[key] for key in _SGD_DEFAULTS} | {"lr": float(group["lr"])}
        return UpdateRule(name="SGD", options=options, implementation=_implementation(group))
    if kind is torch.optim.Adafactor:
        options = {key: group[key] for key in ("beta2_decay", "d", "weight_decay", "maximize")}
        options |= {"lr": float(group["lr"]), "eps1": group["eps"][0], "eps2": group["eps"][1]}
        return _adafactor(options)
    if kind.__module__.startswith("bitsandbytes.") and kind.__name__.removeprefix("Paged") in ("Adam8bit", "AdamW8bit"):
        return _eight_bit(kind.__name__, float(group["weight_decay"]))
    return None


def _implementation(group: Mapping[str, Any]) -> str:
    """Returns how PyTorch updates a group of parameters on a card: `foreach`, unless it is told otherwise."""
    foreach, fused, loop = IMPLEMENTATIONS
    return fused if group.get("fused") else loop if group.get("foreach") is False else foreach


def rules_of(optimizer: torch.optim.Optimizer, paths: Mapping[int, str]) -> dict[str, UpdateRule]:
    """Returns the rule of each parameter, by path, that a user's optimizer updates. `paths`: by identity. InputError
    for an optimizer that is no rule, and for parameters of another model."""
    rules: dict[str, UpdateRule] = {}
    for group in optimizer.param_groups:
        rule = rule_of(optimizer, group)
        if rule is None:
            raise InputError(
                f"optimizer is a {type(optimizer).__name__}; one of {', '.join(OPTIMIZERS)}, or an Adam, AdamW, SGD or "
                "Adafactor of torch.optim is expected; a step of your own, (step, inputs), may take any"
            )
        for parameter in group["params"]:
            if id(parameter) not in paths:
                raise InputError(
                    f"optimizer has a parameter of {list(parameter.shape)} that is not the model's; "
                    "make it of model.parameters()"
                )
            rules[paths[id(parameter)]] = rule
    return rules


def _adam(name: str, *, is_decoupled: bool = False, **options: Any) -> AdamRule:
    kind = "aten._fused_adamw_" if is_decoupled else "aten._fused_adam_"
    return AdamRule(name=name, kind=kind, options=_ADAM_DEFAULTS | options)


def _adafactor(options: Mapping[str, Any]) -> AdafactorRule:
    return AdafactorRule(name="Adafactor", kind="gdp.adafactor_", options=options)


def _eight_bit(name: str, weight_decay: float) -> EightBitAdamRule:
    options = {"weight_decay": weight_decay, "lr": 1e-3}
    return EightBitAdamRule(name=name, kind="bitsandbytes.optimizer_update_8bit_blockwise", options=options)


@torch.library.custom_op("gdp::adafactor_", mutates_args=("weight", "state"))
def _adafactor_update(
    weight: Tensor,
    gradient: Tensor,
    state: list[Tensor],
    *,
    lr: float,
    beta2_decay: float,
    eps1: float | None,
    eps2: float,
    d: float,
    weight_decay: float,
) -> None:
    """Updates `weight` as `torch.optim.Adafactor` does; state: row and column factors or variance, then the count."""
    *factors, count = state
    rows, columns, variances = ([factors[0]], [factors[1]], [None]) if len(factors) == 2 else ([None], [None], factors)
    adafactor(
        [weight],
        [gradient],
        rows,  # type: ignore[arg-type]
        columns,  # type: ignore[arg-type]
        variances,  # type: ignore[arg-type]
        [count],
        d=d,
        lr=lr,
        beta2_decay=beta2_decay,
        weight_decay=weight_decay,
        eps1=eps1,  # type: ignore[arg-type]
        eps2=eps2,
        maximize=False,
    )


@torch.library.custom_op("gdp::eight_bit_adam_", mutates_args=("weight", "state"))
def _eight_bit_adam_update(
    weight: Tensor, gradient: Tensor, state: list[Tensor], *, lr: float, weight_decay: float
) -> None:
    """Stands for the kernels of bitsandbytes."""
    raise NotImplementedError("the update of 8-bit Adam is computed by kernels of bitsandbytes")


# bitsandbytes 0.44 and later, bitsandbytes/optim/optimizer.py: blocks of 256 elements (2,048 before)
_MIN_8BIT_ELEMENTS, _BLOCK_ELEMENTS = 4096, 256

_ADAM_DEFAULTS = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.0, "eps": 1e-8}
_ADAM_DEFAULTS |= {"amsgrad": False, "maximize": False}
_SGD_DEFAULTS = {"weight_decay": 0.0, "momentum": 0.0, "lr": 1e-3, "dampening": 0.0}
_SGD_DEFAULTS |= {"nesterov": False, "maximize": False}
_ADAFACTOR_DEFAULTS = {"lr": 1e-2, "beta2_decay": -0.8, "eps1": None, "eps2": 1e-3, "d": 1.0}
_ADAFACTOR_DEFAULTS |= {"weight_decay": 0.0, "maximize": False}

_SGD = UpdateRule(name="sgd", options=_SGD_DEFAULTS)

OPTIMIZERS: Mapping[str, UpdateRule] = MappingProxyType(
    {  # the defaults of torch.optim, but for SGD's momentum, which has none: 0.9 is that of its documentation's example
        "adam": _adam("adam"),
        "adamw": _adam("adamw", is_decoupled=True, weight_decay=1e-2),
        "sgd": _SGD,
        "sgd-momentum": replace(_SGD, name="sgd-momentum", options=_SGD_DEFAULTS | {"momentum": 0.9}),
        "adafactor": replace(_adafactor(_ADAFACTOR_DEFAULTS), name="adafactor"),
        "adam-8bit": _eight_bit("adam-8bit", 0.0),
    }
)  # the optimizers of `--optimizer`, by name
