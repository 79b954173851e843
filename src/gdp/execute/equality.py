"""Equality: does a placed step give what PyTorch gives by itself?"""

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gdp.capture import Program, Replay
from gdp.capture.program import named_state, named_tensors
from gdp.capture.step import Loss, pick_loss
from gdp.execute.worker import ExecutionError


@dataclass(frozen=True, slots=True)
class Equality:
    """How the results of two steps compare. Relative differences are to the largest element of a tensor, or, where that
    is known and more, to `NOISE_FACTOR` times the tensor's noise."""

    num_tensors: int  # compared: loss, outputs, gradients, state
    num_equal: int  # bit for bit
    largest_difference: float  # relative; infinite if shapes, types or what is no number differ, or one side has it not
    where: str  # the tensor that has it; "" if all are equal

    @property
    def is_exact(self) -> bool:
        return self.num_equal == self.num_tensors

    def is_close(self, tolerance: float) -> bool:
        """Are all relative differences at most `tolerance`?"""
        return self.largest_difference <= tolerance


def compare(
    found: Replay, expected: Replay, ignored_outputs: Collection[str] = (), noisy: Replay | None = None
) -> Equality:
    """`found` beside `expected`; devices may differ. All must be on both sides, but for state, some of it on one.

    `noisy` is what the step gives from inputs rounded anew: gradients that are zero but for rounding, or pass many
    normalisations, differ so much between any two ways to add.
    """
    here, there = dict(_tensors(found, ignored_outputs)), dict(_tensors(expected, ignored_outputs))
    rounded = {} if noisy is None else dict(_tensors(noisy, ignored_outputs))
    num_tensors, num_equal, largest, where = 0, 0, 0.0, ""
    for name in here | there:
        if name.endswith(_STATE) and not (name in here and name in there):
            continue
        num_tensors += 1
        is_there = name in here and name in there
        difference = _difference(here[name], there[name], rounded.get(name)) if is_there else float("inf")
        num_equal += difference == 0.0
        if difference > largest:
            largest, where = difference, name
    return Equality(num_tensors, num_equal, largest, where)


def eager_step(
    program: Program, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], loss: Loss | None = None
) -> Replay:
    """Loss, outputs and gradients that PyTorch computes by itself, and buffers afterwards; `model` is then as before.

    On one thread, since more of them may add up in another order. Equal to what `program` computes unless random
    numbers are drawn, for which PyTorch has other seeds. ExecutionError if the model fails.
    """
    is_training, num_threads = program.loss is not None, torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with _restored(model), torch.set_grad_enabled(is_training):
            output = model(*args, **kwargs)
            value = pick_loss(output, loss, program.graph.name) if is_training else None
            if value is not None:
                value.backward()  # type: ignore[no-untyped-call]
            gradients = {name: tensor.grad for name, tensor in model.named_parameters() if tensor.grad is not None}
            parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
            buffers = {name: tensor for name, tensor in named_state(model) if name not in parameters}
            outputs = dict(named_tensors(output, ""))
            return Replay(None if value is None else value.detach(), _copies(outputs), gradients, _copies(buffers))
    except Exception as error:
        raise ExecutionError("cpu", "the unplaced step, to compare with", error) from error
    finally:
        torch.set_num_threads(num_threads)


def on_cpu(replay: Replay) -> Replay:
    """The same tensors on the CPU."""

    def moved(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.cpu() for name, tensor in tensors.items()}

    loss = None if replay.loss is None else replay.loss.cpu()
    return Replay(loss, moved(replay.outputs), moved(replay.gradients), moved(replay.state))


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Kernels of GPUs compute in the types of their tensors: PyTorch lets cuDNN round float32 to TF32 otherwise."""
    cudnn: Any = torch.backends.cudnn
    settings: tuple[Any, ...] = (cudnn.conv, cudnn.rnn, torch.backends.cuda.matmul)
    before = [setting.fp32_precision for setting in settings]
    try:
        for setting in settings:
            setting.fp32_precision = "ieee"
        yield
    finally:
        for setting, precision in zip(settings, before, strict=True):
            setting.fp32_precision = precision


def updated_outputs(program: Program) -> set[str]:
    """The outputs that lie in the memory of a parameter: placed, they are read after its update, unplaced before."""
    updated = {
        program.tensor_values[source.tensor] for source in program.sources.values() if source.kind == "parameter"
    }
    for calls in program.calls:
        for call in calls:
            updated |= {new for old, new in call.writes if old in updated}
    return {name for name, ref in program.outputs.items() if ref.value in updated} if program.gradients else set()


NOISE_FACTOR = 1e4  # ten times the noise is then a thousandth of it: other kernels were within twice
_NUM_UNITS = 16  # of noise in the inputs, which stands for that of all ops
_STATE = " of the state"


def _tensors(replay: Replay, ignored_outputs: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    if replay.loss is not None:
        yield "the loss", replay.loss
    yield from (
        (f"{name!r} of the outputs", item) for name, item in replay.outputs.items() if name not in ignored_outputs
    )
    yield from ((f"{name!r} of the gradients", item) for name, item in replay.gradients.items())
    yield from ((f"{name!r}{_STATE}", item) for name, item in replay.state.items())


def rounded_anew(content: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """The same tensors with noise of some units in the last place of each element; integers as they are."""
    random = torch.Generator().manual_seed(0)

    def noisy(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        noise = torch.randn(tensor.shape, generator=random, dtype=torch.float64)
        return (tensor.double() * (1.0 + _NUM_UNITS * torch.finfo(tensor.dtype).eps * noise)).to(tensor.dtype)

    return {number: noisy(tensor) for number, tensor in content.items()}


def without_parameters(replay: Replay, program: Program) -> Replay:
    """Without what an update made of the parameters: a gradient that is zero but for rounding moves them either way."""
    names = {name for source in program.sources.values() if source.kind == "parameter" for name in source.views}
    return replace(replay, state={name: tensor for name, tensor in replay.state.items() if name not in names})


def _difference(here: Tensor, there: Tensor, noisy: Tensor | None = None) -> float:
    """0 if all bits are equal, or both no numbers in the same places."""
    here, there = here.detach().cpu(), there.detach().cpu()
    if here.shape != there.shape or here.dtype != there.dtype:
        return float("inf")
    is_same = (here == there) | (here.isnan() & there.isnan())
    if is_same.all():
        return 0.0
    wide = torch.complex128 if here.is_complex() else torch.float64
    difference = (here.to(wide) - there.to(wide)).abs()[~is_same]
    if not difference.isfinite().all():
        return float("inf")
    sizes = there.to(wide).abs()
    scale = float(sizes[sizes.isfinite()].max()) if sizes.isfinite().any() else 0.0
    if noisy is not None:
        noise = (noisy.detach().cpu().to(wide) - there.to(wide)).abs()
        scale = max(scale, NOISE_FACTOR * float(noise[noise.isfinite()].max() if noise.isfinite().any() else 0.0))
    return float(difference.max()) / (scale or 1.0)


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


@contextlib.contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """The model's tensors and gradients are afterwards what they were; there are no gradients meanwhile."""
    state = [(tensor, tensor.detach().clone()) for _, tensor in named_state(model)]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for tensor, content in state:
                tensor.data.copy_(content)
