"""Operators that PyTorch composes of others on CPUs and that are one kernel on a card, captured as that kernel.

A step is captured on the CPU. So while it runs, these operators take the way of CUDA, in
`aten/src/ATen/native/Dropout.cpp`, `layer_norm.cpp` and `RNN.cpp` of PyTorch 2.13:

- `dropout` in training is `native_dropout`, whose mask has a byte for each element, and else nothing; in place, and of
  whole channels, it is composed on cards too;
- `rms_norm` is `_fused_rms_norm`, and its backward pass is one kernel;
- `gru_cell` and `lstm_cell` are two products and a kernel that adds the biases;
- `log_sigmoid` keeps nothing but its input for the backward pass.

They are the operators with a kernel for CUDA and none for CPUs in `native_functions.yaml`, as far as a model can reach
them; `fused_attention.py` has attention. CPUs compute them by the functions below."""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from gdp.models.pytorch.autocast import kernels

aten = torch.ops.aten
LOG_SIGMOID, LOG_SIGMOID_BACKWARD = aten.log_sigmoid_forward.default, aten.log_sigmoid_backward.default

_composed_dropout: Callable[..., Tensor] = aten.dropout.default.decompose


def kernels_of_cards() -> contextlib.AbstractContextManager[None]:
    """Makes these operators what they are on cards; the process has one such region at a time."""
    composed: list[tuple[str, Callable[..., Any], str]] = [
        ("dropout", _dropout, "AutogradCPU"),
        ("gru_cell", _gru_cell, "AutogradCPU"),
        ("lstm_cell", _lstm_cell, "AutogradCPU"),
    ]
    computed = [(func._schema.name, function, "CPU") for func, function in FUSED.items()]
    # PyTorch has no shapes of the first, and wrong ones of the second without biases
    cells = [(name, function, "Meta") for name, function, _ in computed if "cell" in name]
    return kernels([*composed, *computed, *cells, ("_scaled_grouped_mm_v2", _grouped_shapes, "Meta")])


def _dropout(input: Tensor, p: float, train: bool) -> Tensor:
    if not train or p == 0 or not input.numel():
        return input  # PyTorch's composition in Python would copy it
    output: Tensor = torch.native_dropout(input, p, train)[0] if p < 1 else _composed_dropout(input, p, train)
    return output


def _gru_cell(
    input: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Tensor:
    output: Tensor = aten._thnn_fused_gru_cell(input.matmul(w_ih.t()), hx.matmul(w_hh.t()), hx, b_ih, b_hh)[0]
    return output


def _lstm_cell(
    input: Tensor,
    hx: Sequence[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    gates = input.matmul(w_ih.t()), hx[0].matmul(w_hh.t())
    hy, cy, _ = aten._thnn_fused_lstm_cell(*gates, hx[1], b_ih, b_hh)
    return hy, cy


def _grouped_shapes(a: Tensor, b: Tensor, *args: Any, **options: Any) -> Tensor:
    """Returns the result of a product of groups without content, of which PyTorch has no shapes."""
    by_name = dict(zip(("offs", "bias", "out_dtype"), args[6:], strict=False)) | options
    num_groups = [by_name["offs"].shape[0]] if a.dim() == b.dim() == 2 else [a.shape[0]] if a.dim() == b.dim() else []
    return a.new_empty((*num_groups, a.shape[-2], b.shape[-1]), dtype=by_name.get("out_dtype") or torch.bfloat16)


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
    return solution if is_vector else solution.mT, residuals, a.new_empty(0, dtype=torch.long), a.real.new_empty(0)


FAKE_RESULTS: Mapping[OpOverload, Callable[..., Any]] = {
    **dict.fromkeys((aten._ctc_loss.default, aten._ctc_loss.Tensor), _ctc_loss),
    **dict.fromkeys(
        (aten._ctc_loss_backward.default, aten._ctc_loss_backward.Tensor), lambda _, x, *args: torch.empty_like(x)
    ),
    aten.linalg_lstsq.default: _least_squares,
    aten.baddbmm.dtype: lambda c, a, b, dtype, **options: c.new_empty(*a.shape[:2], b.shape[2], dtype=dtype),
}  # results without content of operators that PyTorch has no shapes for


# What the kernels compute


def _norm_backward(
    grad: Tensor, input: Tensor, shape: Sequence[int], rstd: Tensor, weight: Tensor | None, mask: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    dims = list(range(input.dim() - len(shape), input.dim()))
    wide = grad.to(rstd.dtype)
    normalised = input.to(rstd.dtype) * rstd
    scaled = wide if weight is None else wide * weight.to(rstd.dtype)
    d_input = (scaled - normalised * (scaled * normalised).mean(dims, keepdim=True)) * rstd
    rows = math.prod(input.shape[: dims[0]])
    d_weight = (wide * normalised).reshape(rows, *shape).sum(0) if weight is not None and mask[1] else None
    return (
        d_input.to(input.dtype) if mask[0] else None,
        None if d_weight is None or weight is None else d_weight.to(weight.dtype),
    )


def _sums(gates: tuple[Tensor, Tensor], biases: tuple[Tensor | None, Tensor | None]) -> tuple[Tensor, Tensor]:
    """Returns the gates of input and state, each with its bias."""
    first, second = (gate if bias is None else gate + bias for gate, bias in zip(gates, biases, strict=True))
    return first, second


def _fused_gru_cell(
    of_input: Tensor, of_state: Tensor, hx: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    of_input, of_state = _sums((of_input, of_state), (b_ih, b_hh))
    (reset_i, update_i, new_i), (reset_h, update_h, new_h) = of_input.chunk(3, 1), of_state.chunk(3, 1)
    reset, update = torch.sigmoid(reset_i + reset_h), torch.sigmoid(update_i + update_h)
    new = torch.tanh(new_i + reset * new_h)
    return new + update * (hx - new), torch.cat((reset, update, new, hx, new_h), 1)


def _fused_gru_cell_backward(grad: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
    reset, update, new, hx, new_h = workspace.chunk(5, 1)
    d_update = grad * (hx - new) * (1 - update) * update
    d_new = grad * (1 - update) * (1 - new * new)
    d_reset = d_new * new_h * (1 - reset) * reset
    of_input, of_state = torch.cat((d_reset, d_update, d_new), 1), torch.cat((d_reset, d_update, d_new * reset), 1)
    biases = (of_input.sum(0), of_state.sum(0)) if has_bias else (None, None)
    return of_input, of_state, grad * update, *biases


def _fused_lstm_cell(
    of_input: Tensor, of_state: Tensor, cx: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    of_input, of_state = _sums((of_input, of_state), (b_ih, b_hh))
    entry, forget, cell, exit = (of_input + of_state).chunk(4, 1)
    entry, forget, cell, exit = entry.sigmoid(), forget.sigmoid(), cell.tanh(), exit.sigmoid()
    cy = forget * cx + entry * cell
    return exit * cy.tanh(), cy, torch.cat((entry, forget, cell, exit), 1)


def _fused_lstm_cell_backward(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    entry, forget, cell, exit = workspace.chunk(4, 1)
    hidden = cy.tanh()
    grad = torch.zeros_like(cx) if grad_hy is None else grad_hy
    d_cy = grad * exit * (1 - hidden * hidden) + (0 if grad_cy is None else grad_cy)
    d_entry, d_forget = d_cy * cell * (1 - entry) * entry, d_cy * cx * (1 - forget) * forget
    d_gates = (d_entry, d_forget, d_cy * entry * (1 - cell * cell), grad * hidden * (1 - exit) * exit)
    d_all = torch.cat(d_gates, 1)
    return d_all, d_cy * forget, d_all.sum(0) if has_bias else None


def log_sigmoid_backward(grad: Tensor, input: Tensor, buffer: Tensor) -> Tensor:
    """Computes the buffer that a card has not filled."""
    buffer = buffer if buffer.shape == input.shape else LOG_SIGMOID(input)[1]
    gradient: Tensor = LOG_SIGMOID_BACKWARD(grad, input, buffer)
    return gradient


FUSED: Mapping[OpOverload, Callable[..., Any]] = {
    aten._fused_rms_norm.default: aten._fused_rms_norm.default.decompose,
    aten._fused_rms_norm_backward.default: _norm_backward,
    aten._thnn_fused_gru_cell.default: _fused_gru_cell,
    aten._thnn_fused_gru_cell_backward.default: _fused_gru_cell_backward,
    aten._thnn_fused_lstm_cell.default: _fused_lstm_cell,
    aten._thnn_fused_lstm_cell_backward_impl.default: _fused_lstm_cell_backward,
}  # kernels that CPUs lack, and the functions that compute them there
