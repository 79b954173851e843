"""The arms that benchmark `execution-against` steps beside gdp's plan: PyTorch's own ways to train on two devices.

    eager        one process      the whole batch, or its parts one after the other: what others must compute
    ddp          two processes    DistributedDataParallel, half of the batch each
    fsdp         two processes    fully_shard, layer by layer or of the whole model; half of the batch each
    pipelining   two processes    two stages of torch.distributed.pipelining

All update with fused Adam, after the mean gradient of the batch.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.rival_stages import VARIANTS, pipeline_steps
from benchmarks.training_subjects import Inputs, Subject, loss_of

NUM_PROCESSES = 2
LEARNING_RATE = 1e-3  # of `capture`'s Adam
EAGER, DDP, FSDP, PIPELINING = "eager", "ddp", "fsdp", "pipelining"

BY_LAYER = "layer by layer"

TakeStep = Callable[[], float | None]
"""Trains a step, and returns the mean loss of this process's samples before it; None where it has none."""


@dataclass(frozen=True, kw_only=True)
class RivalSetting:
    """The model that the processes of an arm train, and how it is cut."""

    subject: Subject
    layers: tuple[str, ...]  # module paths, which FSDP shards one by one
    cut: str  # the module path that the second stage begins with


@dataclass(frozen=True)
class RivalArm:
    """A way to train. `make` gets the setting, the rank and a variant."""

    num_processes: int
    variants: tuple[str, ...]
    make: Callable[[RivalSetting, int, str], TakeStep]
    num_parts: Callable[[str], int]  # of the batch whose losses are averaged, by variant


def adam(*groups: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Returns the optimizer of all arms; each group is updated by itself."""
    listed = [{"params": list(group)} for group in groups]
    return torch.optim.Adam([group for group in listed if group["params"]], lr=LEARNING_RATE, fused=True)


def _eager(setting: RivalSetting, _rank: int, variant: str) -> TakeStep:
    """Returns the step of one process; `variant` is the number of parts of the batch."""
    module, parts = setting.subject.module(int(variant)), setting.subject.inputs(int(variant))
    return _accumulated(module, adam(module.parameters()), parts)


def _ddp(setting: RivalSetting, rank: int, _variant: str) -> TakeStep:
    module = nn.parallel.DistributedDataParallel(setting.subject.module(NUM_PROCESSES))
    return _accumulated(module, adam(module.parameters()), [setting.subject.inputs(NUM_PROCESSES)[rank]])


def _fsdp(setting: RivalSetting, rank: int, variant: str) -> TakeStep:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    module = setting.subject.module(NUM_PROCESSES)
    mesh = init_device_mesh("cpu", (NUM_PROCESSES,))
    scalars = {parameter for parameter in module.parameters() if not parameter.dim()}  # which it cannot shard
    for path in setting.layers if variant == BY_LAYER else ():
        fully_shard(module.get_submodule(path), mesh=mesh, ignored_params=scalars)
    fully_shard(module, mesh=mesh, ignored_params=scalars)
    sharded = [parameter for parameter in module.parameters() if parameter.dim()]
    optimizer = adam(sharded, list(scalars))
    return _accumulated(module, optimizer, [setting.subject.inputs(NUM_PROCESSES)[rank]], list(scalars))


def _pipelining(setting: RivalSetting, rank: int, variant: str) -> TakeStep:
    return pipeline_steps(setting.subject, setting.cut, rank, variant, adam)


def _accumulated(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    parts: Sequence[Inputs],
    replicated: Sequence[nn.Parameter] = (),
) -> TakeStep:
    """Returns a step of `parts`, one after the other; gradients of `replicated` are averaged over processes."""

    def step() -> float:
        optimizer.zero_grad()
        losses = []
        for inputs in parts:
            loss = loss_of(module, inputs)
            (loss / len(parts) if len(parts) > 1 else loss).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        for parameter in replicated:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= NUM_PROCESSES
        optimizer.step()
        return float(torch.stack(losses).mean())

    return step


ARMS: Mapping[str, RivalArm] = {
    EAGER: RivalArm(1, ("1",), _eager, int),
    DDP: RivalArm(NUM_PROCESSES, ("",), _ddp, lambda _: NUM_PROCESSES),
    FSDP: RivalArm(NUM_PROCESSES, (BY_LAYER, "whole model"), _fsdp, lambda _: NUM_PROCESSES),
    PIPELINING: RivalArm(NUM_PROCESSES, tuple(VARIANTS), _pipelining, lambda variant: VARIANTS[variant][1]),
}
