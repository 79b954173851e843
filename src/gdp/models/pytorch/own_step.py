"""A user's training step: a function that runs forward, backward and its optimizers, or a module with `training_step`.
The step is called twice on fake tensors. The first call makes the states of optimizers, the second one is recorded."""

import contextlib
import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import Optimizer

from gdp.errors import InputError
from gdp.models.pytorch.fake_copies import check_kinds, fake_memories
from gdp.models.pytorch.memories import Memories
from gdp.models.pytorch.program import named_inputs, named_state, named_tensors
from gdp.models.pytorch.recorder import Recorder
from gdp.models.pytorch.step_calls import StepCalls, intercepted
from gdp.models.pytorch.step_parts import StepParts

Step = Callable[..., Any]
Explain = Callable[..., contextlib.AbstractContextManager[None]]

_REFUSAL = "it is a step of your own; give its module with --optimizer to execute it"


def has_own_step(model: Any) -> bool:
    """Returns whether a module says how it is trained: `training_step(batch)` and `configure_optimizers()`."""
    return isinstance(model, nn.Module) and all(
        callable(getattr(model, name, None)) for name in ("training_step", "configure_optimizers")
    )


def record_own_step(
    model: Step | nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    mode: FakeTensorMode,
    built: Sequence[Optimizer],
    explained: Explain,
) -> tuple[Recorder, dict[str, Any], StepCalls]:
    """Records a step; returns the recording, the results by name, and the intercepted calls. `model` is the step, or a
    module with `training_step` and `configure_optimizers`; `built` are optimizers that the step may use, `explained`
    turns errors into InputErrors. Real tensors of modules and optimizers are replaced by fake ones meanwhile."""
    parts = StepParts({"": model}) if isinstance(model, nn.Module) else StepParts.of(model, built)
    with explained():
        for module in parts.modules.values():
            check_kinds(module, named_state(module))
        check_kinds(None, named_inputs(args, kwargs))
    with _faked(parts, args, kwargs, mode) as (fake_args, fake_kwargs):
        step: Step = model
        if isinstance(model, nn.Module):
            with mode, explained():
                step, parts.optimizers = _module_step(model)
        return _recorded(step, parts, fake_args, fake_kwargs, mode, explained)


def _recorded(
    step: Step,
    parts: StepParts,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    mode: FakeTensorMode,
    explained: Explain,
) -> tuple[Recorder, dict[str, Any], StepCalls]:
    calls = StepCalls(parts)
    with contextlib.ExitStack() as undo:
        undo.enter_context(intercepted(calls))
        with mode, torch.enable_grad(), explained():
            step(*args, **kwargs)
        recorder = Recorder(mode)
        recorder.phases.are_found = True
        _add_sources(recorder.memories, parts, calls, args, kwargs)
        for prefix, module in parts.modules.items():
            for handle in recorder.running.watch(module, prefix):
                undo.callback(handle.remove)
        calls.recorder = recorder
        recorder.refusals[_REFUSAL] = None
        with mode, recorder, torch.enable_grad(), explained(recorder):
            answer = step(*args, **kwargs)
        if not calls.num_updates:
            raise InputError(
                "the step updates no parameters; a function that calls backward() and the step() of an optimizer is "
                "expected, or (module, example_inputs), or a function of JAX arrays"
            )
        outputs = {name: recorder.memories.ref(tensor) for name, tensor in named_tensors(answer, "")}
    return recorder, outputs, calls


def _module_step(module: nn.Module) -> tuple[Step, list[Optimizer]]:
    """Returns a step of a module with `training_step` and `configure_optimizers`, and its optimizers. One optimizer
    steps by itself after the backward pass of the loss, unless `automatic_optimization` is False: then the module calls
    `self.optimizers()` and `self.manual_backward(loss)`."""
    optimizers = _configured(module.configure_optimizers())  # type: ignore[operator]
    is_automatic = getattr(module, "automatic_optimization", True)
    if is_automatic and len(optimizers) != 1:
        raise InputError(
            f"configure_optimizers() returns {len(optimizers)} optimizers; one is expected, or automatic_optimization "
            "= False and steps in training_step"
        )
    helpers: dict[str, Any] = {
        "optimizers": lambda *_args, **_kwargs: optimizers[0] if len(optimizers) == 1 else optimizers,
        "lr_schedulers": lambda: None,
        "manual_backward": lambda loss, *args, **kwargs: loss.backward(*args, **kwargs),
        "log": lambda *_args, **_kwargs: None,
        "log_dict": lambda *_args, **_kwargs: None,
        "toggle_optimizer": lambda *_args, **_kwargs: None,
        "untoggle_optimizer": lambda *_args, **_kwargs: None,
    }

    def step(*args: Any, **kwargs: Any) -> Any:
        batch: Any = args[0] if len(args) == 1 else args or kwargs
        training_step: Any = module.training_step
        takes_index = "batch_idx" in inspect.signature(training_step).parameters
        with patch.multiple(module, create=True, **helpers):
            if is_automatic:
                optimizers[0].zero_grad()
            answer = training_step(batch, batch_idx=0) if takes_index else training_step(batch)
            if is_automatic:
                loss = answer["loss"] if isinstance(answer, Mapping) else answer
                if not isinstance(loss, Tensor):
                    raise InputError(
                        f"training_step returns {type(loss).__name__}; a loss, or a dict with one, is expected"
                    )
                loss.backward()  # type: ignore[no-untyped-call]
                optimizers[0].step()
        return answer

    return step, optimizers


def _configured(answer: Any) -> list[Optimizer]:
    """Returns the optimizers among what `configure_optimizers` returns; schedulers do nothing."""
    if isinstance(answer, Optimizer):
        return [answer]
    if isinstance(answer, Mapping):
        return _configured(answer.get("optimizer"))
    if isinstance(answer, (list, tuple)):
        return [optimizer for item in answer for optimizer in _configured(item)]
    return []


def _add_sources(
    memories: Memories, parts: StepParts, calls: StepCalls, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    for prefix, module in parts.modules.items():
        memories.add_module(module, prefix)
    for path, trained in calls.paths.values():
        memories.add_source("parameter", path, trained)
        if trained.grad is not None:
            memories.name_attribute(f"{path}.grad", trained.grad)
    for path, tensor in parts.tensors.items():
        memories.name_attribute(path, tensor)
    for path, tensor in named_inputs(args, kwargs):
        memories.add_source("input", path, tensor)


@contextlib.contextmanager
def _faked(
    parts: StepParts, args: Sequence[Any], kwargs: Mapping[str, Any], mode: FakeTensorMode
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Puts fake tensors in the place of real ones in modules and optimizers, for a while; yields the fake inputs."""
    state = [tensor for module in parts.modules.values() for _, tensor in named_state(module)]
    state += [tensor for _, tensor in parts.parameters().values()]
    fakes: dict[int, Any] = {id(tensor): tensor for _, tensor in named_inputs(args, kwargs)}
    for tensors in (state, [tensor for _, tensor in named_inputs(args, kwargs)]):
        fakes |= fake_memories([tensor for tensor in tensors if not isinstance(tensor, FakeTensor)], mode)
    with contextlib.ExitStack() as undo:
        for module in {id(part): part for outer in parts.modules.values() for part in outer.modules()}.values():
            for held in (module._parameters, module._buffers, vars(module)):
                undo.enter_context(_replaced_values(held, fakes))
        for optimizer in parts.optimizers:
            for group in optimizer.param_groups:
                real = group["params"]
                undo.enter_context(_replaced_values(group, {id(real): [fakes.get(id(p), p) for p in real]}))
            undo.enter_context(patch.object(optimizer, "state", defaultdict(dict)))
        yield copy.deepcopy(tuple(args), dict(fakes)), copy.deepcopy(dict(kwargs), dict(fakes))


@contextlib.contextmanager
def _replaced_values(held: dict[str, Any], by_identity: Mapping[int, Any]) -> Iterator[None]:
    before = {key: value for key, value in held.items() if id(value) in by_identity}
    held.update({key: by_identity[id(value)] for key, value in before.items()})
    try:
        yield
    finally:
        held.update(before)
