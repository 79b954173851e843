"""Results without content of operators that PyTorch has no shapes for, or the shapes of its CPU kernels."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from gdp.models.pytorch.card_kernels import LOG_SIGMOID
from gdp.models.pytorch.replacements import LSTM, workspace_bytes

aten = torch.ops.aten
# types of grouped products that PyTorch computes and has no shapes for
_UNKNOWN_TO_GROUPS = (torch.float32, torch.float16)


def run_fake(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Runs an operator on fake tensors, without autocast, which has cast its arguments already."""
    if func in _RESULTS:
        return _RESULTS[func](*args, **kwargs)
    if func is aten._grouped_mm.default and args[0].dtype in _UNKNOWN_TO_GROUPS:
        halves = [item.to(torch.bfloat16) for item in args[:2]]
        return func(*halves, *args[2:], **kwargs).to(args[0].dtype)
    with torch._C._DisableAutocast() if torch._C._is_any_autocast_enabled() else contextlib.nullcontext():
        result = func(*args, **kwargs)
    if func is LSTM and torch.is_grad_enabled():  # without a kernel, the workspace has no size
        workspace = result[3].new_empty(workspace_bytes(args[0], hidden_size=args[10], mode=args[9]))
        return *result[:3], workspace
    if func is LOG_SIGMOID:  # only CPUs fill the buffer
        return result[0], result[1].new_empty(0)
    return result


def _ctc_loss(log_probs: Tensor, targets: Tensor, *_args: Any) -> tuple[Tensor, Tensor]:
    """Takes [time, batch, classes], and targets as long as their tensor allows, or, in one row, as their mean."""
    batch = log_probs.shape[1]
    length = targets.shape[1] if targets.dim() > 1 else -(-targets.numel() // max(1, batch))
    return log_probs.new_empty(batch), log_probs.new_empty(batch, log_probs.shape[0], 2 * length + 1)


def _least_squares(a: Tensor, b: Tensor, *_args: Any, **_options: Any) -> tuple[Tensor, ...]:
    """Returns what cards do: all of the solution's memory, residuals if there are any, no rank."""
    (m, n), is_vector = a.shape[-2:], b.dim() == 1 or b.shape == a.shape[:-1]
    columns = [] if is_vector else [b.shape[-1]]
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[: -1 if is_vector else -2])  # type: ignore[no-untyped-call]
    solution = a.new_empty((*batch, *columns, max(m, n)))[..., :n]
    residuals = a.new_empty((*batch, *columns) if m > n else 0)
    rank = a.new_empty(0, dtype=torch.long)
    return solution if is_vector else solution.mT, residuals, rank, a.real.new_empty(0)


_RESULTS: Mapping[OpOverload, Callable[..., Any]] = {
    aten._ctc_loss.default: _ctc_loss,
    aten._ctc_loss.Tensor: _ctc_loss,
    aten._ctc_loss_backward.default: lambda _grad, log_probs, *_args: torch.empty_like(log_probs),
    aten._ctc_loss_backward.Tensor: lambda _grad, log_probs, *_args: torch.empty_like(log_probs),
    aten.linalg_lstsq.default: _least_squares,
    aten.baddbmm.dtype: lambda c, a, b, dtype, **options: c.new_empty(*a.shape[:2], b.shape[2], dtype=dtype),
}
