"""The calls of a training step that are not operators: optimizers, schedulers, gradient scalers, numbers read.

While a user's step is recorded, `intercepted` replaces them:

- `step` of an optimizer with a rule becomes one update for each parameter; others run as they are written.
- The `step` of a learning rate scheduler does nothing.
- A `GradScaler` scales the loss and the gradients, and finds all gradients finite.
- A number read from a float tensor (`loss.item()`) is one that can be printed and added up, but not compared."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from gdp.errors import InputError
from gdp.models.pytorch.optimizers import rule_of
from gdp.models.pytorch.recorder import Recorder
from gdp.models.pytorch.shards.given_styles import styles_noted
from gdp.models.pytorch.step_parts import StepParts

_LATE_STEP = 1000.0  # for the count of steps in an optimizer's code: a step in the midst of training
_SCALE = 65536.0  # the first scale of a GradScaler; any other has the same cost


class StepCalls:
    """Carries out the intercepted calls of a step: first without a recorder, to make the optimizers' states."""

    def __init__(self, parts: StepParts) -> None:
        self.parts, self.paths = parts, parts.parameters()
        self.recorder: Recorder | None = None
        self.num_updates = 0
        self.notes: dict[str, None] = {}
        self.is_in_optimizer = False
        self._unscaled: set[int] = set()

    def backward(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Calls `torch.autograd.backward`, and gives the recorder the gradients that there are afterwards."""
        recorder = self.recorder
        if recorder is None:
            original(*args, **kwargs)
            return
        recorder.phases.is_backward = True
        try:
            original(*args, **kwargs)
        finally:
            recorder.phases.is_backward = False
        for _, parameter in self.paths.values():
            if parameter.grad is not None:
                recorder.add_gradient(parameter)

    def step(self, optimizer: Optimizer, original: Callable[..., Any], closure: Any = None) -> Any:
        """Replaces `optimizer.step(closure)`."""
        if isinstance(optimizer, torch.optim.LBFGS):
            raise InputError("LBFGS evaluates the model as often as tensors' content says; take another optimizer")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        rules = [rule_of(optimizer, group) for group in optimizer.param_groups]
        if any(rule is None for rule in rules):
            self._run(optimizer, original)
            return loss
        for group, rule in zip(optimizer.param_groups, rules, strict=True):
            for parameter in group["params"]:
                if parameter.grad is not None and self.recorder is not None and rule is not None:
                    self.recorder.record_update(self.paths[id(parameter)][0], parameter, rule)
                    self.num_updates += 1
        return loss

    def _run(self, optimizer: Optimizer, original: Callable[..., Any]) -> None:
        """Runs the code of an optimizer without a rule, operator by operator."""
        recorder = self.recorder
        if recorder is not None:
            for parameter, state in optimizer.state.items():
                for tensor in state.values():
                    if isinstance(tensor, Tensor) and id(parameter) in self.paths:
                        recorder.add_state(tensor, parameter)
            name = type(optimizer).__name__
            self.notes[f"{name} is counted operator by operator, as its code runs, not as one kernel"] = None
            self.num_updates += 1
            recorder.phases.is_updating = True
        self.is_in_optimizer = True
        try:
            with torch.no_grad():
                original()
        finally:
            self.is_in_optimizer = False
            if recorder is not None:
                recorder.phases.is_updating = False

    # -- gradient scalers ------------------------------------------------------------------------------------------

    def scale(self, scaler: GradScaler, outputs: Any) -> Any:
        """Replaces `scaler.scale(outputs)`."""
        if not scaler.is_enabled():
            return outputs
        if isinstance(outputs, Tensor):
            return outputs * _SCALE
        return type(outputs)(self.scale(scaler, output) for output in outputs)

    def unscale(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """Replaces `scaler.unscale_(optimizer)`: reads and writes each gradient once."""
        if not scaler.is_enabled() or id(optimizer) in self._unscaled:
            return
        self._unscaled.add(id(optimizer))
        with torch.no_grad():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.mul_(1 / _SCALE)

    def scaler_step(self, scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Replaces `scaler.step(optimizer)`, with all gradients finite."""
        self.unscale(scaler, optimizer)
        return optimizer.step(*args, **kwargs)

    def scaler_update(self, _scaler: GradScaler, _new_scale: Any = None) -> None:
        """Replaces `scaler.update()`: gradients are scaled anew."""
        self._unscaled.clear()

    # -- numbers ---------------------------------------------------------------------------------------------------

    def item(self, tensor: Tensor, original: Callable[[Tensor], Any]) -> Any:
        """Returns a number in place of the content of a fake tensor."""
        if not isinstance(tensor, FakeTensor) or tensor.constant is not None or not tensor.is_floating_point():
            return original(tensor)
        return _LATE_STEP if self.is_in_optimizer else UnreadNumber()

    def number(self, tensor: Tensor, original: Callable[[Tensor], Any]) -> Any:
        """Returns a plain number, with a note, where Python takes nothing else."""
        value = self.item(tensor, original)
        if isinstance(value, UnreadNumber):
            self.notes["float(tensor) is 1.0 in a capture: a decision that depends on it may go the other way"] = None
        return float(value)


def _undecided(*_others: Any) -> Any:
    raise InputError(
        "the step decides by a number from a tensor (a comparison after .item()), which a capture does not have; take "
        "that decision outside the step"
    )


def _unread(*_others: Any) -> "UnreadNumber":
    return UnreadNumber()


class UnreadNumber(float):
    """A number that a capture does not have: it can be printed and added up, a comparison raises InputError."""

    def __new__(cls, *_args: Any) -> "UnreadNumber":
        """Returns one that is shown as 1.0."""
        return float.__new__(cls, 1.0)

    __hash__ = float.__hash__
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _unread
    __pow__ = __rpow__ = __neg__ = __abs__ = __mod__ = __floordiv__ = _unread
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __bool__ = _undecided


@contextlib.contextmanager
def intercepted(calls: StepCalls) -> Iterator[None]:
    """Replaces the calls of optimizers, schedulers, gradient scalers and reads of numbers by those of `calls`."""
    item, number, shown = Tensor.item, Tensor.__float__, Tensor.__format__
    replacements: list[tuple[Any, str, Any]] = [
        *((optimizer, "step", _step_of(calls, optimizer)) for optimizer in calls.parts.optimizers),
        *((kind, "step", lambda *_args, **_options: None) for kind in _with_subclasses(LRScheduler)),
        (GradScaler, "scale", lambda scaler, outputs: calls.scale(scaler, outputs)),
        (GradScaler, "unscale_", lambda scaler, optimizer: calls.unscale(scaler, optimizer)),
        (GradScaler, "step", lambda *args, **options: calls.scaler_step(*args, **options)),
        (GradScaler, "update", lambda *args, **options: calls.scaler_update(*args, **options)),
        (GradScaler, "get_scale", lambda _scaler: _SCALE),
        (Tensor, "item", lambda tensor: calls.item(tensor, item)),
        (Tensor, "__float__", lambda tensor: calls.number(tensor, number)),
        (Tensor, "__format__", lambda tensor, text: _shown(tensor, text, shown)),
        (torch.autograd, "backward", partial(calls.backward, torch.autograd.backward)),
    ]
    with contextlib.ExitStack() as undo:
        if "torch._dynamo" in sys.modules:  # else nothing is compiled
            undo.enter_context(torch.compiler.set_stance("force_eager"))
        for owner, name, value in replacements:
            undo.enter_context(patch.object(owner, name, value))
        yield


@contextlib.contextmanager
def building(optimizers: list[Optimizer]) -> Iterator[None]:
    """Collects the optimizers that are made, and lets a GradScaler for CUDA be enabled without a GPU. Numbers of a
    truncated normal distribution are drawn once: PyTorch looks at them, and draws some again."""
    original = Optimizer.__init__

    def made(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        optimizers.append(optimizer)

    with (
        patch.object(Optimizer, "__init__", made),
        patch.object(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
        patch.object(torch.nn.init, "_no_grad_trunc_normal_", _trunc_normal),
        styles_noted(),
    ):
        yield


def _trunc_normal(tensor: Tensor, mean: float, std: float, a: float, b: float, generator: Any = None) -> Tensor:
    with torch.no_grad():
        return tensor.normal_(mean, std, generator=generator)


def _step_of(calls: StepCalls, optimizer: Optimizer) -> Callable[..., Any]:
    original = optimizer.step
    return lambda closure=None, **_options: calls.step(optimizer, original, closure)


def _with_subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    for child in type.__subclasses__(kind):
        yield from _with_subclasses(child)


def _shown(tensor: Tensor, text: str, original: Callable[[Tensor, str], str]) -> str:
    if isinstance(tensor, FakeTensor) and not tensor.dim():
        return format(1.0, text) if text else str(tensor)
    return original(tensor, text)
