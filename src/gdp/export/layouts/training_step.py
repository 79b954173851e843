"""Trains a module in the layout of a gdp plan: replicas, parts of layers, micro-batches, ZeRO and recomputed blocks."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard  # noqa: F401
from torch.distributed.tensor.parallel import (  # noqa: F401
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

MICROBATCHES = (1,)  # of each replica, all of the same number of samples
TENSOR = 1  # neighbouring ranks that are one replica, and have a part of its layers each
STYLES: tuple[tuple[str, ParallelStyle], ...] = ()  # of modules that are in parts
ZERO = 0  # 1: optimizer state is cut over ranks, 2: gradients as well, 3: parameters as well
SHARDED: tuple[str, ...] = ()  # modules whose parameters are gathered one module at a time (ZeRO 2 and 3)
COMPUTED_IN = ""  # the type that products are computed in, of float32 weights; "": as the model is written
RECOMPUTED: tuple[str, ...] = ()  # modules that run again in the backward pass
SELECTIVE = False  # but for attention and every second product, as in torchtitan
IS_SHARDED = len(MICROBATCHES) > 1 and (ZERO > 1 or TENSOR > 1)  # by fully_shard
COMPILED: dict[str, dict[str, Any]] = {"compile": {}, "cuda-graphs": {"mode": "reduce-overhead"}}  # by GDP_RUNTIME


def start() -> torch.device:
    """Joins the ranks that torchrun started; returns the device of this one."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    if dist.get_world_size() != len(MICROBATCHES) * TENSOR:
        ranks = len(MICROBATCHES) * TENSOR
        raise ValueError(f"{dist.get_world_size()} ranks, the layout has {ranks}; see --nproc-per-node")
    if kind == "cpu":
        return torch.device(kind)
    torch.cuda.set_device(dist.get_node_local_rank())
    return torch.device(kind, torch.cuda.current_device())


def parallelize(module: nn.Module, device: torch.device) -> nn.Module:
    """Returns the replica of this rank on its device; `module` has the same weights on all ranks, best on the CPU."""
    module = module.float() if COMPUTED_IN else module
    sizes = (1, len(MICROBATCHES), TENSOR) if ZERO else (len(MICROBATCHES), 1, TENSOR)
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("replicate", "shard", "tensor"))
    if TENSOR > 1:
        _cut(module, mesh["tensor"])
    for path in RECOMPUTED:
        parent, _, name = path.rpartition(".")
        options = {"context_fn": _kept} if SELECTIVE else {}
        block = checkpoint_wrapper(module.get_submodule(path), CheckpointImpl.NO_REENTRANT, **options)
        module.get_submodule(parent).register_module(name, block)
    if (settings := COMPILED.get(os.environ.get("GDP_RUNTIME", ""))) is not None:
        module.compile(**settings)
    if len(MICROBATCHES) == 1:
        return module.to(device)
    if not IS_SHARDED:
        return DistributedDataParallel(module.to(device), gradient_as_bucket_view=True)
    mesh = mesh["shard"] if ZERO else mesh["replicate", "shard"]
    policy = MixedPrecisionPolicy(*((getattr(torch, COMPUTED_IN), torch.float32) if COMPUTED_IN else ()))
    for path in SHARDED:  # each moves to the device alone, the whole might not fit
        fully_shard(module.get_submodule(path), mesh=mesh, reshard_after_forward=ZERO == 3, mp_policy=policy)
    return fully_shard(module, mesh=mesh, reshard_after_forward=ZERO == 3, mp_policy=policy)


def _cut(module: nn.Module, mesh: DeviceMesh) -> None:
    """Cuts the layers in place; tied parameters stay tied."""
    places: dict[int, list[dict[str, nn.Parameter | None]]] = {}
    names: dict[int, list[str]] = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append(owner._parameters)
                names.setdefault(id(parameter), []).append(name)
    for path, style in STYLES:
        parallelize_module(module, mesh, {path: style})
    for number, owners in places.items():
        for parameters, name in zip(owners, names[number], strict=True):
            parameters[name] = owners[0][names[number][0]]


def _kept() -> Any:
    """Returns contexts that keep results of attention and of every second product."""
    products = [0, 0]

    def policy(context: Any, func: Any, *_args: Any, **_options: Any) -> CheckpointPolicy:
        is_product = func is torch.ops.aten.mm.default
        products[context.is_recompute] += is_product
        is_kept = products[context.is_recompute] % 2 == 1 if is_product else "attention" in str(func)
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]


def optimizer(model: nn.Module, kind: type[torch.optim.Optimizer], **settings: Any) -> torch.optim.Optimizer:
    """Returns an optimizer such as `torch.optim.AdamW` of the parameters of `model`, the result of `parallelize`."""
    if ZERO == 1 and not IS_SHARDED:
        return ZeroRedundancyOptimizer(model.parameters(), kind, **settings)
    groups: dict[Any, list[nn.Parameter]] = {}  # by mesh: updates of several parameters do not mix them
    for parameter in model.parameters():
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return kind([{"params": parameters} for parameters in groups.values()], **settings)


def share(batch: Tensor) -> Tensor:
    """Returns the samples of this rank, of a batch that all ranks have."""
    replica = dist.get_rank() // TENSOR
    before, own = sum(MICROBATCHES[:replica]), MICROBATCHES[replica]
    return torch.cat(batch.chunk(sum(MICROBATCHES))[before : before + own])


def backward(model: nn.Module, loss_of: Callable[..., Tensor], *samples: Tensor) -> Tensor:
    """Sets gradients to those of the mean loss of the whole batch, and returns this loss. `loss_of(model, *part)` is
    the mean loss of a part of the tensors `samples` of this rank."""
    count, total = MICROBATCHES[dist.get_rank() // TENSOR], sum(MICROBATCHES)
    loss = torch.zeros((), device=samples[0].device)
    for number, part in enumerate(zip(*(tensor.chunk(count) for tensor in samples), strict=True), 1):
        with _summed(model, is_last=number == count), loss_parallel() if TENSOR > 1 else nullcontext():
            with _computed_in(loss.device.type):
                # ranks are averaged over; one with more micro-batches than others counts more
                one = loss_of(model, *part) * (len(MICROBATCHES) / total)
                one = one.full_tensor() if isinstance(one, DTensor) else one
            torch.autograd.backward(one)
        loss += one.detach()
    for parameter in model.parameters() if TENSOR > 1 else ():
        if isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor):  # of parts of the tokens
            parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
    dist.all_reduce(loss)
    return loss / dist.get_world_size()


def _computed_in(kind: str) -> torch.autocast:
    """Casts the weights of products, unless FSDP does."""
    is_cast = bool(COMPUTED_IN) and not IS_SHARDED
    return torch.autocast(kind, getattr(torch, COMPUTED_IN or "bfloat16"), enabled=is_cast)


@contextmanager
def _summed(model: nn.Module, *, is_last: bool) -> Iterator[None]:
    """Sums gradients over ranks in the last micro-batch; with ZeRO 3 in each, as their memory is."""
    if isinstance(model, DistributedDataParallel) and not is_last:
        with model.no_sync():
            yield
        return
    if isinstance(model, FSDPModule) and ZERO < 3:
        model.set_requires_gradient_sync(is_last)
        model.set_reshard_after_backward(is_last)
    yield
