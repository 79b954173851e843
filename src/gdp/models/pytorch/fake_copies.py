"""Fake tensors that share memory as real ones do."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from gdp.models.unsupported import LAZY, NESTED, QUANTISED, SCRIPTED, SPARSE, WRAPPED, WRAPPER, UnsupportedError


def check_kinds(model: Any, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raises UnsupportedError for a module of torch.jit, and for a tensor that is no plain memory, with its name."""
    if isinstance(model, nn.Module) and any(isinstance(part, torch.jit.ScriptModule) for part in model.modules()):
        raise UnsupportedError(SCRIPTED)
    for name, tensor in tensors:
        if kind := _refused_kind(tensor):
            raise UnsupportedError(kind.replace("; ", f" ({name}); ", 1))


def _refused_kind(tensor: Tensor) -> str | None:
    if is_lazy(tensor):
        return LAZY
    if tensor.is_nested:
        return NESTED
    if tensor.is_quantized:
        return QUANTISED
    if hasattr(tensor, "placements"):
        return WRAPPED
    if is_traceable_wrapper_subclass(tensor):
        return WRAPPER
    return SPARSE if tensor.layout is not torch.strided else None


def fake_memories(tensors: Sequence[Tensor], mode: FakeTensorMode) -> dict[int, Any]:
    """Returns a fake tensor for each of `tensors`, by identity; those that overlap still do."""
    memo: dict[int, Any] = {}
    by_memory: dict[Any, dict[int, Tensor]] = {}
    for tensor in tensors:
        by_memory.setdefault((tensor.untyped_storage()._cdata, tensor.dtype), {})[id(tensor)] = tensor
    for sharing in by_memory.values():
        memo |= dict(zip(sharing, _fake_memory(list(sharing.values()), mode), strict=True))
    return memo


def _fake_memory(tensors: list[Tensor], mode: FakeTensorMode) -> list[Tensor]:
    """Returns fake tensors that overlap as these do, in memory of just the extent that they cover."""
    start = min(tensor.storage_offset() for tensor in tensors)
    steps = ((x, zip(x.shape, x.stride(), strict=True)) for x in tensors if x.numel())
    extents = [x.storage_offset() + sum((n - 1) * step for n, step in pairs) + 1 for x, pairs in steps]
    with mode, torch.no_grad():
        memory = torch.empty(max(extents, default=start) - start, dtype=tensors[0].dtype)
        fakes: list[Tensor] = []
        for tensor in tensors:
            fake = memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset() - start).detach()
            if isinstance(tensor, nn.Parameter):
                fakes.append(nn.Parameter(fake, tensor.requires_grad))
            else:
                fakes.append(fake.requires_grad_(tensor.requires_grad))
    return fakes
