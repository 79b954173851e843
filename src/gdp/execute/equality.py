"""Equality: does a placed step give what PyTorch gives by itself?"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gdp.capture import Program, Replay
from gdp.capture.program import named_state, named_tensors
from gdp.capture.step import Loss, pick_loss


@dataclass(frozen=True, slots=True)
class Equality:
    """How the results of two steps compare. Relative differences are to the largest element of a tensor."""

    num_tensors: int  # compared: loss, outputs, gradients, state
    num_equal: int  # bit for bit
    largest_difference: float  # relative; NaN if one side alone is not a number
    where: str  # the tensor that has it; "" if all are equal

    @property
    def is_exact(self) -> bool:
        return self.num_equal == self.num_tensors

    def is_close(self, tolerance: float) -> bool:
        """Are all relative differences at most `tolerance`?"""
        return self.largest_difference <= tolerance


def compare(found: Replay, expected: Replay) -> Equality:
    """`found` beside `expected`, over the tensors of both; devices may differ."""
    wanted = dict(_tensors(expected))
    num_tensors, num_equal, largest, where = 0, 0, 0.0, ""
    for name, tensor in _tensors(found):
        if name not in wanted:
            continue
        here, there = tensor.detach().cpu(), wanted[name].detach().cpu()
        num_tensors += 1
        if torch.equal(here, there) or (
            (here.isnan() == there.isnan()).all() and torch.equal(here.nan_to_num(), there.nan_to_num())
        ):
            num_equal += 1
            continue
        scale = float(there.abs().max()) if there.numel() else 0.0
        difference = float((here.double() - there.double()).abs().max()) / (scale or 1.0)
        if not difference <= largest:
            largest, where = difference, name
    return Equality(num_tensors, num_equal, largest, where)


def eager_step(
    program: Program, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], loss: Loss | None = None
) -> Replay:
    """Loss, outputs and gradients that PyTorch computes by itself, on a copy of `model`, and its buffers afterwards.

    On one thread, since more of them may add up in another order. Equal to what `program` computes unless random
    numbers are drawn, for which PyTorch has other seeds.
    """
    model = copy.deepcopy(model)
    model.zero_grad(set_to_none=True)
    is_training, num_threads = program.loss is not None, torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.set_grad_enabled(is_training):
            output = model(*args, **kwargs)
            value = pick_loss(output, loss, program.graph.name) if is_training else None
            if value is not None:
                value.backward()  # type: ignore[no-untyped-call]
    finally:
        torch.set_num_threads(num_threads)
    gradients = {name: tensor.grad for name, tensor in model.named_parameters() if tensor.grad is not None}
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = {name: tensor for name, tensor in named_state(model) if name not in parameters}
    outputs = {name: tensor.detach() for name, tensor in named_tensors(output, "")}
    return Replay(None if value is None else value.detach(), outputs, gradients, buffers)


def _tensors(replay: Replay) -> Iterator[tuple[str, Tensor]]:
    if replay.loss is not None:
        yield "the loss", replay.loss
    for kind in ("outputs", "gradients", "state"):
        for name, tensor in getattr(replay, kind).items():
            yield f"{name!r} of the {kind}", tensor
