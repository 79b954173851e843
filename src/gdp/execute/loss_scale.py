"""Loss scales: training in float16, with a `torch.amp.GradScaler`.

    scale -> gradient of the loss -> gradients -> norms --+--> finite: updates by gradients over the scale
      ^                                                   +--> not finite: all updates are left out
      +---- grows, or backs off --------------------------+

The ops are those of clipping. All ranks, and all replicas, leave out the same steps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from gdp.errors import InputError
from gdp.execute.clipping import FUSED, Clipping, gradients_of_updates, with_clipping
from gdp.execute.layouts.step_program import micro_batch_of
from gdp.execute.plan_executor import PlanExecutor
from gdp.models.pytorch import Program
from gdp.models.pytorch.recorded_calls import Call

aten = torch.ops.aten

_LEFT_OUT = FUSED | {aten.add_.Tensor, aten._to_copy.default, aten.copy_.default}
"""Calls of updates that leave parameters as they are if the fused kernel does nothing."""


@dataclass(frozen=True, slots=True)
class ScaledProgram:
    """A program whose loss is scaled, and its order [D]."""

    program: Program
    order: tuple[list[int], ...]
    loss_ops: Mapping[int, float]  # that make the gradient of the loss, and their share of it
    scale_op: int
    overflow: int  # a tensor of one number: 0 where all gradients are finite

    def set_scale(self, scale: float) -> None:
        """Changes the scale of the following steps; the first one has that of the program."""
        for op, share in self.loss_ops.items():
            self.program.set_keyword(op, "value", share * scale)
        self.program.set_keyword(self.scale_op, "inverse_scale", 1.0 / scale)


def with_loss_scale(
    program: Program, order: Sequence[npt.ArrayLike], scale: float, max_norm: float | None = None
) -> ScaledProgram:
    """Returns the program and its order [D] with the loss times `scale`, and gradients divided by it and clipped.

    Clipped as by `with_clipping`, unless `max_norm` is None. InputError where an update cannot be left out.
    """
    gradients = gradients_of_updates(program, "scaler")
    part, origins = micro_batch_of(program)
    calls = [
        call for calls, phase in zip(part.calls, part.graph.phases, strict=True) if phase == "update" for call in calls
    ]
    refused = next((call.func for call in calls if call.func not in _LEFT_OUT), None)
    if refused is not None:
        raise InputError(
            f"scaler: an optimizer with {refused} cannot leave a step out; give Adam, AdamW or SGD, or no scaler"
        )
    if any(part.layouts[ref.value].dtype == torch.float16 for ref in part.gradients.values()):
        raise InputError(
            "scaler: gradients of float16 parameters cannot be unscaled; keep parameters in float32, with autocast"
        )
    shares = _loss_shares(program, part, origins)
    scaled = list(program.calls)
    for op, share in shares.items():
        scaled[op] = tuple(
            replace(call, args=call.args[:1], kwargs={"value": share * scale}) if _fills(call) else call
            for call in program.calls[op]
        )
    clipping = Clipping(replace(program, calls=tuple(scaled)), gradients, max_norm, scale)
    scaled_program, new_order = clipping.build(order)
    ops = {int(clipping.number[op]): share for op, share in shares.items()}
    return ScaledProgram(scaled_program, new_order, ops, clipping.scale, scaled_program.graph.num_tensors - 1)


def _loss_shares(program: Program, part: Program, origins: Sequence[int]) -> dict[int, float]:
    """Returns by op that makes the gradient of the loss the number that it is filled with."""
    first = next((op for op, phase in enumerate(part.graph.phases) if phase == "backward"), -1)
    shares = {
        op: float(call.args[1])
        for op, origin in enumerate(origins)
        if origin == first
        for call in program.calls[op]
        if _fills(call)
    }
    if not shares:
        raise InputError(
            f"scaler: the backward pass of {program.graph.name} does not begin with the gradient of one loss; leave "
            "the scaler out"
        )
    return shares


def _fills(call: Call) -> bool:
    return call.func is aten.fill_.Scalar


class LossScaler:
    """A user's `torch.amp.GradScaler`, which follows the steps of a placed model; None scales nothing."""

    def __init__(self, scaler: torch.amp.GradScaler | None) -> None:
        if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
            raise InputError(f"scaler is a {type(scaler).__name__}; a torch.amp.GradScaler is expected")
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._scaled: ScaledProgram | None = None

    def state(self) -> dict[str, float]:
        """Returns the state of the scaler by key, {} without one."""
        return {} if self._scaler is None else dict(self._scaler.state_dict())

    def tensors(self) -> dict[str, Tensor]:
        """Returns the state to resume from: the scale and the count of steps since it changed."""
        state = self.state()
        return {key: torch.tensor(float(state[key]), dtype=torch.float64) for key in _SAVED if key in state}

    def load(self, tensors: Mapping[str, Tensor], where: str) -> None:
        """Loads the answer of `tensors`; a scaler keeps its state where the saved training had none."""
        if tensors and self._scaler is None:
            raise InputError(f"{where}: the training scales its loss; give scaler=torch.amp.GradScaler(...)")
        if tensors.keys() == set(_SAVED) and self._scaler is not None:
            scale, tracker = (float(tensors[key]) for key in _SAVED)
            self._scaler.load_state_dict(self.state() | {"scale": scale, "_growth_tracker": int(tracker)})

    def built(
        self, program: Program, order: Sequence[npt.ArrayLike], clip_norm: float | None
    ) -> tuple[Program, Sequence[npt.ArrayLike]]:
        """Returns the program and its order with the loss scaled and gradients clipped, if they are to be."""
        if self._scaler is not None:
            self._scaled = with_loss_scale(program, order, self._scaler.get_scale(), clip_norm)
            return self._scaled.program, self._scaled.order
        return (program, order) if clip_norm is None else with_clipping(program, order, clip_norm)

    def begin(self) -> None:
        """Begins a step, with the scale as it is now."""
        if self._scaled is not None and self._scaler is not None:
            self._scaled.set_scale(self._scaler.get_scale())

    def end(self, executor: PlanExecutor, record: Any) -> None:
        """Ends a step: the scale grows or backs off, by PyTorch's own kernel."""
        if self._scaled is None or self._scaler is None:
            return
        overflow, state = executor.kept(record, self._scaled.overflow), self.state()
        scale, tracker = torch.tensor(state["scale"]), torch.tensor(state["_growth_tracker"], dtype=torch.int32)
        grow, back_off, interval = (state[key] for key in ("growth_factor", "backoff_factor", "growth_interval"))
        torch._amp_update_scale_(scale, tracker, overflow, grow, back_off, int(interval))
        self._scaler.load_state_dict(state | {"scale": float(scale), "_growth_tracker": int(tracker)})


_SAVED = ("scale", "_growth_tracker")
