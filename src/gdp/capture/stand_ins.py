"""Stand-ins: operators that PyTorch has on CPUs alone, or otherwise there, made for other devices of what those have.

A model is captured on the CPU, where attention and LSTM layers become operators that no GPU has. Elsewhere the public
functions take their place, for which PyTorch finds the device's own kernels; a backward pass runs the forward pass once
more to differentiate it. What only the CPU's backward pass reads (of attention the logarithms of its sums, of an LSTM
its workspace) is zeros then, and where the CPU's is given zeros, it makes it anew: a plan may split the two.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import functional

aten = torch.ops.aten

# cuDNN would have them in one piece, but each is a tensor of the graph
warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")

ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default
ATTENTION_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
LSTM = aten.mkldnn_rnn_layer.default
LSTM_BACKWARD = aten.mkldnn_rnn_layer_backward.default
LAYER_NORM_BACKWARD = aten.native_layer_norm_backward.default


def function_for(func: OpOverload, device: torch.device | None) -> Callable[..., Any]:
    """What computes `func` on `device` (None: the CPU): itself, but for operators of this module."""
    chosen = _ON_CPU if device is None or device.type == "cpu" else _ELSEWHERE
    return chosen.get(func, func)


def workspace_bytes(input: Tensor, hidden_size: int) -> int:
    """What an LSTM layer keeps for its backward pass, at the least: four gates and a cell for each step and sequence.

    Kernels keep more, each another amount: oneDNN 15 values of 1,024 units in 35 steps of 64 sequences, not 5.
    """
    return 5 * math.prod(input.shape[:2]) * hidden_size * input.element_size()


def _attention(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False, *,
    attn_mask: Tensor | None = None, scale: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    shares_heads = key.shape[1] != query.shape[1]
    output = functional.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=shares_heads
    )
    sums = torch.promote_types(query.dtype, torch.float32)
    return output, torch.zeros(query.shape[:-1], dtype=sums, device=query.device)


def _attention_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, *args: Any,
    **options: Any,
) -> Sequence[Tensor]:  # fmt: skip
    return _gradients(lambda *leaves: _attention(*leaves, *args, **options), (query, key, value), (grad_out,))


def _attention_backward_on_cpu(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, *args: Any,
    **options: Any,
) -> Any:  # fmt: skip
    if not logsumexp.any():
        out, logsumexp = ATTENTION(query, key, value, *args, **options)
    return ATTENTION_BACKWARD(grad_out, query, key, value, out, logsumexp, *args, **options)


def _lstm(
    input: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, hx: Tensor, cx: Tensor, reverse: bool,
    batch_sizes: Sequence[int], mode: int, hidden_size: int, num_layers: int, has_biases: bool, bidirectional: bool,
    batch_first: bool, train: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    steps = input.flip(0) if reverse else input  # oneDNN has time first, whatever `batch_first` says
    weights = [w_ih, w_hh, *([b_ih, b_hh] if has_biases else [])]
    states = [hx.unsqueeze(0), cx.unsqueeze(0)]
    output, hy, cy = torch.lstm(steps, states, weights, has_biases, 1, 0.0, train, False, False)
    num_bytes = workspace_bytes(input, hidden_size) if torch.is_grad_enabled() else 0
    workspace = torch.zeros(num_bytes, dtype=torch.uint8, device=input.device)
    return output.flip(0) if reverse else output, hy.squeeze(0), cy.squeeze(0), workspace


def _lstm_backward(
    input: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, hx: Tensor, cx: Tensor, output: Tensor,
    hy: Tensor, cy: Tensor, grad_output: Tensor | None, grad_hy: Tensor | None, grad_cy: Tensor | None, *args: Any,
) -> Sequence[Tensor]:  # fmt: skip
    forward_args, has_biases = (*_forward_args(*args)[:-1], True), args[4]  # cuDNN's backward pass wants `train`

    def run(input: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, hx: Tensor, cx: Tensor) -> tuple[Tensor, ...]:
        return _lstm(input, w_ih, w_hh, b_ih, b_hh, hx, cx, *forward_args)[:3]

    bias = b_ih if has_biases else input.new_zeros(w_ih.shape[0])
    d_input, d_w_ih, d_w_hh, d_bias, d_hx, d_cx = _gradients(
        run, (input, w_ih, w_hh, bias, hx, cx), (grad_output, grad_hy, grad_cy)
    )
    return d_input, d_w_ih, d_w_hh, d_bias, d_bias, d_hx, d_cx  # the biases are added up: one gradient for both


def _lstm_backward_on_cpu(*args: Any) -> Any:
    *given, workspace = args
    if not workspace.any():
        with torch.enable_grad():  # or no workspace is made
            workspace = LSTM(*given[:7], *_forward_args(*args[13:]))[3]
    return LSTM_BACKWARD(*given, workspace)


def _layer_norm_backward(
    grad_out: Tensor, input: Tensor, shape: Sequence[int], mean: Tensor, rstd: Tensor, *args: Any
) -> Any:
    sums = torch.promote_types(input.dtype, torch.float32)  # CPUs keep the mean of half types in half, GPUs read floats
    return LAYER_NORM_BACKWARD(grad_out, input, shape, mean.to(sums), rstd.to(sums), *args)


def _forward_args(
    reverse: bool, mode: int, hidden_size: int, num_layers: int, has_biases: bool, train: bool, bidirectional: bool,
    batch_sizes: Sequence[int], batch_first: bool, workspace: Tensor,
) -> tuple[Any, ...]:  # fmt: skip
    """Of the forward pass, after the tensors, from those of the backward pass."""
    return reverse, batch_sizes, mode, hidden_size, num_layers, has_biases, bidirectional, batch_first, train


def _gradients(
    run: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> Sequence[Tensor]:
    """Those of `inputs`, given those of what `run` makes of them; None: nothing depends on that output."""
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        pairs = [(out, grad) for out, grad in zip(run(*leaves), gradients, strict=False) if grad is not None]
        outputs, given = zip(*pairs, strict=True)
        return torch.autograd.grad(outputs, leaves, given, materialize_grads=True)


_ELSEWHERE: Mapping[OpOverload, Callable[..., Any]] = {
    ATTENTION: _attention, ATTENTION_BACKWARD: _attention_backward, LSTM: _lstm, LSTM_BACKWARD: _lstm_backward,
    LAYER_NORM_BACKWARD: _layer_norm_backward,
}  # fmt: skip
_ON_CPU: Mapping[OpOverload, Callable[..., Any]] = {
    ATTENTION_BACKWARD: _attention_backward_on_cpu, LSTM_BACKWARD: _lstm_backward_on_cpu,
}  # fmt: skip
