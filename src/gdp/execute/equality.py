"""Equality: compares the results of a placed step with those of plain PyTorch."""

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gdp.execute.plan_executor import ExecutionError
from gdp.models.pytorch import Program, Replay
from gdp.models.pytorch.cards import as_if_on_a_card
from gdp.models.pytorch.loss import Loss, pick_loss
from gdp.models.pytorch.program import named_state, named_tensors


@dataclass(frozen=True, slots=True)
class Equality:
    """Differences between the results of two steps. They are relative to the largest element of a tensor, or, if that
    is known and more, to `NOISE_FACTOR` times the tensor's noise."""

    num_tensors: int  # compared: loss, outputs, gradients, state
    num_equal: int  # bit for bit
    largest_difference: float  # relative; infinite if shapes, types or NaNs differ, or one side lacks the tensor
    where: str  # the tensor that has it; "" if all are equal

    @property
    def is_exact(self) -> bool:
        return self.num_equal == self.num_tensors

    def is_close(self, tolerance: float) -> bool:
        """Returns whether all relative differences are at most `tolerance`."""
        return self.largest_difference <= tolerance


def compare(
    results: Replay, expected: Replay, ignored_outputs: Collection[str] = (), noisy: Replay | None = None
) -> Equality:
    """Compares results on any devices. All tensors must be on both sides, but for state, which one side may lack.

    `noisy` are the results for `noisy_inputs`: gradients that are zero but for rounding, or pass many normalisations,
    differ so much between any two ways to add."""
    here, there = dict(_tensors(results, ignored_outputs)), dict(_tensors(expected, ignored_outputs))
    rounded = {} if noisy is None else dict(_tensors(noisy, ignored_outputs))
    shared = here.keys() & there.keys()
    names = [name for name in here | there if name in shared or not name.endswith(_STATE)]
    far = dict.fromkeys(names, float("inf"))
    differences = far | {x: _difference(here[x], there[x], rounded.get(x)) for x in names if x in shared}
    where = max(differences, key=lambda name: differences[name], default="")
    largest = differences.get(where, 0.0)
    num_equal = sum(difference == 0.0 for difference in differences.values())
    return Equality(len(differences), num_equal, largest, where if largest else "")


def eager_parts(
    program: Program,
    model: nn.Module,
    parts: Sequence[tuple[Sequence[Any], Mapping[str, Any]]],
    loss: Loss | None = None,
    *,
    num_first: int = 1,
    num_threads: int = 1,
) -> Replay:
    """Returns loss, outputs and gradients that PyTorch computes of parts of a batch, and buffers afterwards. `parts`
    are the inputs of each part: the loss is the mean of theirs, gradients are added up in their order, outputs of part
    p are called `NAME@p` if there are several, and buffers are those after the first `num_first` parts. More
    threads than one may add up in another order. The results equal those of `program` unless random numbers are drawn,
    for which PyTorch has other seeds. ExecutionError if the model fails."""
    is_training, known_threads = program.loss is not None, torch.get_num_threads()
    torch.set_num_threads(num_threads)
    losses: list[Tensor] = []
    outputs: dict[str, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    try:
        with _restored(model), _as_captured(model), torch.set_grad_enabled(is_training):
            for number, (args, kwargs) in enumerate(parts):
                output = model(*args, **kwargs)
                if is_training:
                    value = pick_loss(output, loss, program.graph.name)
                    (value if len(parts) == 1 else value / len(parts)).backward()  # type: ignore[no-untyped-call]
                    losses.append(value.detach())
                end = f"@{number}" if len(parts) > 1 else ""
                outputs |= _copies({name + end: tensor for name, tensor in named_tensors(output, "")})
                if number == num_first - 1:
                    buffers = _copies(_buffers(model))
            gradients = {name: tensor.grad for name, tensor in model.named_parameters() if tensor.grad is not None}
            mean = torch.stack(losses).mean(0) if len(losses) > 1 else losses[0] if losses else None
            return Replay(mean, outputs, gradients, buffers)
    except Exception as error:
        raise ExecutionError("cpu", "the unplaced step, to compare with", error) from error
    finally:
        torch.set_num_threads(known_threads)


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: tensor for name, tensor in named_state(model) if name not in parameters}


def _as_captured(model: nn.Module) -> contextlib.AbstractContextManager[object]:
    """Returns a region in which a model on the CPU that asks for a card runs as it was captured."""
    is_on_cpu = all(tensor.device.type == "cpu" for _, tensor in named_state(model))
    return as_if_on_a_card() if is_on_cpu else contextlib.nullcontext()


def on_cpu(replay: Replay) -> Replay:
    """Moves the tensors to the CPU."""
    found = replay.outputs, replay.gradients, replay.state
    outputs, gradients, state = ({name: tensor.cpu() for name, tensor in tensors.items()} for tensors in found)
    return Replay(None if replay.loss is None else replay.loss.cpu(), outputs, gradients, state)


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Makes GPUs compute in the types of their tensors: PyTorch lets cuDNN round float32 to TF32 otherwise."""
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
    """Returns the outputs in the memory of a parameter: placed, they are read after its update, unplaced before."""
    updated = {program.tensor_values[one.tensor] for one in program.sources.values() if one.kind == "parameter"}
    for calls in program.calls:
        for call in calls:
            updated |= {new for old, new in call.writes if old in updated}
    return {name for name, ref in program.outputs.items() if ref.value in updated} if program.gradients else set()


NOISE_FACTOR = 1e4  # ten times the noise is then a thousandth of it: other kernels were within twice
_NUM_UNITS = 16  # in the last place: noise of the inputs that stands for that of all ops
_STATE = " of the state"


def _tensors(replay: Replay, ignored_outputs: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    if replay.loss is not None:
        yield "the loss", replay.loss
    outputs = {name: tensor for name, tensor in replay.outputs.items() if name not in ignored_outputs}
    parts = {" of the outputs": outputs, " of the gradients": replay.gradients, _STATE: replay.state}
    for part, tensors in parts.items():
        yield from ((f"{name!r}{part}", tensor) for name, tensor in tensors.items())


def noisy_inputs(content: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Adds noise of some units in the last place to each element of the tensors; integers stay as they are."""
    random = torch.Generator().manual_seed(0)

    def noisy(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        noise = torch.randn(tensor.shape, generator=random, dtype=torch.float64)
        return (tensor.double() * (1.0 + _NUM_UNITS * torch.finfo(tensor.dtype).eps * noise)).to(tensor.dtype)

    return {number: noisy(tensor) for number, tensor in content.items()}


def without_parameters(replay: Replay, program: Program) -> Replay:
    """Leaves updated parameters out: a gradient that is zero but for rounding moves them either way."""
    names = {name for source in program.sources.values() if source.kind == "parameter" for name in source.views}
    return replace(replay, state={name: tensor for name, tensor in replay.state.items() if name not in names})


def _difference(here: Tensor, there: Tensor, noisy: Tensor | None = None) -> float:
    """Returns the largest relative difference; 0 if all bits are equal but for NaNs in the same places."""
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
    scale = _largest(there.to(wide))
    if noisy is not None:
        scale = max(scale, NOISE_FACTOR * _largest(noisy.detach().cpu().to(wide) - there.to(wide)))
    return float(difference.max()) / (scale or 1.0)


def _largest(tensor: Tensor) -> float:
    """Returns the largest absolute value that is finite; 0 if there is none."""
    sizes = tensor.abs()
    return float(sizes[sizes.isfinite()].max()) if sizes.isfinite().any() else 0.0


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


@contextlib.contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Restores the model's tensors and gradients afterwards; there are no gradients meanwhile."""
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
