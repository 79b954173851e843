"""The module of one rank: its weights are cut in place, and its forward pass runs on parts."""

# mypy: disable-error-code="no-any-return,no-untyped-call"

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from gdp.errors import InputError
from gdp.models.pytorch.flops import FORMULA, classify, count_flops, product_operand
from gdp.models.pytorch.loss import has_loss
from gdp.models.pytorch.routine import leaves
from gdp.models.pytorch.shards.alike_layers import AlikeLayers
from gdp.models.pytorch.shards.context import ContextRun, SampleRun
from gdp.models.pytorch.shards.cuts import STORED, mark
from gdp.models.pytorch.shards.experts import experts_in, run_experts_locally
from gdp.models.pytorch.shards.local_run import LocalRun
from gdp.models.pytorch.shards.plan import CutPlan, Role, pattern_of, planned
from gdp.models.shards import Shards
from gdp.models.stored_weights import ATTRIBUTE, stored_weights

_MOST_REPEATED = 0.25  # of the FLOPs of products,
_MOST_WHOLE = 0.01  # and where samples are cut: all products have them
_OTHER_PRODUCTS = ("attention", "convolution", "rnn_layer", "trilinear", "cdist")  # in names of operators
_NAMED = 0.0005  # of the FLOPs of products, on all cards together
_SHOWN = 4  # weights in a note
_BALANCED = "expert={}: each rank gets equally many rows (balanced routing is assumed)"
_GIVEN = "weights are cut as parallelize_module in MODEL says, over the ranks of tensor= in place of its mesh"
_SIDES = {"colwise": -2, "rowwise": -1}  # by the beginning of a style of Transformers: the dimension that is cut


def localise(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    shards: Shards,
    name: str,
    *,
    training: bool,
    rank: int = 0,
) -> list[str]:
    """Turns a module on fake tensors into that of a rank, in place; returns notes.

    InputError, with `name`, where more than a quarter of the work would be repeated by each rank.
    """
    num_ranks, tensor = shards.num_ranks, shards.tensor
    if shards.overlap and not training:
        raise InputError(f"{name}: overlap is of gradients' exchanges, and inference has none; leave it out")
    counts = {int(module.num_experts) for module in experts_in(model).values()}  # type: ignore[arg-type]
    if shards.expert > 1 and (not counts or any(count % shards.expert for count in counts)):
        sizes = " and ".join(map(str, sorted(counts)))
        found = f"{sizes} experts in a layer" if counts else "no experts that gdp finds"
        raise InputError(f"{name}: has {found}, and expert={shards.expert} places as many on each rank; leave it out")
    by_tokens = bool(shards.settled(training=training).sequence)
    with torch.set_grad_enabled(training):
        layers = AlikeLayers.of(model, args, kwargs)
        whole = _product_flops(model, args, kwargs, layers)
        options: dict[str, Any] = {"by_tokens": by_tokens, "num_expert_parts": shards.expert, "layers": layers}
        runs: list[Callable[[], LocalRun]] = []  # the innermost last
        plan = CutPlan(model, 1)
        run_experts_locally(model, shards.expert)
        if tensor > 1:
            plan = planned(model, args, kwargs, tensor, **options)
            _cut_weights(model, plan, tensor, rank=rank % tensor)
            of_tensor = partial(LocalRun, by_tokens=by_tokens, gathered=plan.gathered, plan=None)
            runs.append(partial(of_tensor, tensor, rank % tensor))
        if shards.samples > 1:
            plan = CutPlan(model, shards.expert, shards.expert)
            _cut_weights(model, plan, shards.expert, rank=rank)
            runs.append(partial(SampleRun, shards.expert, rank))
        if shards.context > 1:
            runs.append(partial(ContextRun, shards.context, rank // tensor, num_inner=tensor))
        _run_locally(model, runs)
        local = _product_flops(model, args, kwargs, layers)
    share = (local * num_ranks / max(whole, 1) - 1) / (num_ranks - 1)
    return _notes(plan, shards, share, name, _differences(model, plan) if tensor > 1 else [])


def _differences(model: nn.Module, plan: CutPlan) -> list[str]:
    """Returns a note on weights that `tp_plan` of a model of Transformers cuts otherwise."""
    sides = {f"{path}.weight": style for path, style in (getattr(model, "tp_plan", None) or {}).items()}
    others = dict[str, str]()
    for path, weight in plan.weights.items():
        pattern, role = pattern_of(path), plan.roles.get(path)
        style = sides.get(pattern, "")
        side, own = _SIDES.get(style.removeprefix("packed_")[:7]), None if role is None else role.dim - weight.dim()
        if side is not None and own != side:
            here = "whole" if own is None else "by rows" if own == -1 else "by columns"
            others[pattern] = f"{style}, here {here}"
    text = "; ".join(f"{path} {how}" for path, how in list(others.items())[:_SHOWN])
    return [f"the config's tp_plan cuts otherwise: {text}"] if others else []


def _notes(plan: CutPlan, shards: Shards, share: float, name: str, differences: Sequence[str]) -> list[str]:
    num_ranks, degrees = shards.num_ranks, str(replace(shards, sequence=None))
    if shards.tensor == 1:
        what = "samples" if shards.samples > 1 else "tokens"
        if share > (_MOST_WHOLE if shards.samples > 1 else _MOST_REPEATED):
            raise InputError(
                f"{name}: {degrees} would repeat {share:.1%} of the FLOPs on each card, of functions that read all "
                f"{what}, or of {what} that it does not divide; take a smaller number or tensor"
            )
        balanced = [_BALANCED.format(shards.expert)] * (shards.samples > 1)
        shown = f"{degrees} leaves {share:.2%} of the FLOPs whole on each card: they read all {what}"
        return balanced + [shown] * (share * (num_ranks - 1) > _NAMED)
    reasons = plan.whole | plan.repeated or plan.refused
    text = "; ".join(f"{path} {reason}" for path, reason in list(reasons.items())[:_SHOWN])
    text = text + f"; {len(reasons) - _SHOWN} more" * (len(reasons) > _SHOWN) or "other than linear layers"
    if share > _MOST_REPEATED or not plan.roles:
        raise InputError(
            f"{name}: {degrees} would repeat {share:.1%} of the FLOPs on each card"
            f"{f' ({text})' if reasons else ': no linear layers to cut'}; take a smaller number or tensor=1"
        )
    notes = [] if plan.given is None else [_GIVEN]
    notes += differences
    if plan.uneven:
        sizes = " and ".join(map(str, sorted(plan.uneven)))
        notes.append(f"sequence=on: {num_ranks} ranks do not divide {sizes} tokens, which stay whole on each card")
    if plan.num_expert_parts > 1:
        notes.append(_BALANCED.format(plan.num_expert_parts))
    if share * (num_ranks - 1) > _NAMED:
        notes.append(f"{degrees} leaves {share:.2%} of the FLOPs whole on each card: {text}")
    return notes


def _cut_weights(model: nn.Module, plan: CutPlan, num_ranks: int, *, rank: int) -> None:
    """Cuts the weights of a module to those of a rank."""
    parameters = dict(model.named_parameters(remove_duplicate=False))  # stored weights have each of their names
    changed = {
        id(parameters[path]): _cut_parameter(parameters[path], path, role, rank, num_ranks)
        for path, role in plan.roles.items()
    }
    stored = dict(stored_weights(model))
    for path, weight in stored.items():
        local = changed.get(id(parameters[path]), parameters[path])
        stored[path] = replace(weight, num_bytes=-(-weight.num_bytes * local.numel() // parameters[path].numel()))
    if stored:
        setattr(model, ATTRIBUTE, stored)
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in changed:
                module._parameters[key] = changed[id(parameter)]
    for module in experts_in(model).values():
        module.num_experts //= plan.num_expert_parts  # type: ignore[operator,assignment]


def _cut_parameter(parameter: Tensor, path: str, role: Role, rank: int, num_ranks: int) -> nn.Parameter:
    cut = role.cut_of(parameter, path)
    local = cut.part_of(parameter.detach(), rank, num_ranks)
    copy = nn.Parameter(local.clone(memory_format=torch.contiguous_format), parameter.requires_grad)
    setattr(copy, STORED, cut)
    mark(copy, cut.again if role.is_experts else cut)
    return copy


def _run_locally(model: nn.Module, runs: Sequence[Callable[[], LocalRun]]) -> None:
    """Has the forward pass of a module run on parts of parts of each of `runs`, the last of which the code sees."""
    kind: Any = type(model)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return through(runs, partial(kind.forward, self, *args, **kwargs))

    def through(runs: Sequence[Callable[[], LocalRun]], call: Callable[[], Any]) -> Any:
        if not runs:
            return call()
        run = runs[0]()
        with run.running():
            output = through(runs[1:], call)
        return run.finished(output, keeps_cuts=has_loss(output) if torch.is_grad_enabled() else run.context)

    forward.__wrapped__ = kind.forward  # type: ignore[attr-defined]
    model.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


class _ProductFlops(TorchDispatchMode):
    """Counts the FLOPs of products, attention, convolutions, recurrent layers and bilinear forms."""

    def __init__(self) -> None:
        super().__init__()
        self.total, self.factors = 0, [1]

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        is_product = product_operand(func, args) is not None or any(part in name for part in _OTHER_PRODUCTS)
        if is_product and classify(func)[0] == FORMULA:
            outputs = [tensor for tensor in leaves(result) if tensor is not None]
            self.total += count_flops(func, args, kwargs or {}, outputs)[0] * math.prod(self.factors)
        return result


def _product_flops(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], layers: AlikeLayers) -> int:
    counter = _ProductFlops()
    with contextlib.ExitStack() as stack:
        for layer, count in layers.counts.items():
            begun = layer.register_forward_pre_hook(lambda *_, count=count: counter.factors.append(count))
            ended = layer.register_forward_hook(lambda *_: counter.factors.pop() and None)
            stack.callback(begun.remove)
            stack.callback(ended.remove)
        with layers.shortened(), counter, torch.overrides.BaseTorchFunctionMode():
            model(*args, **kwargs)
    return counter.total
