"""Replacements for operators that PyTorch has on CPUs only, or that differ there.

A model is captured on the CPU, where attention and layers of recurrent nets become operators that GPUs lack. On other
devices the public functions replace them, so that PyTorch finds the device's own kernels; a backward pass runs the
forward pass again and differentiates it. A plan may put the two passes on different devices: tensors that only the
CPU's backward pass reads (attention's logarithms of sums, an LSTM's workspace) are zeros when another device makes
them, and the CPU's backward pass computes them again when it is given zeros.

In `card_kernels.py` are operators that cards have and CPUs lack.

Dropout in attention is drawn once more by the backward pass, from the same seed: see `Recorder`."""

import contextlib
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import functional

from gdp.models.pytorch.card_kernels import FUSED, LOG_SIGMOID_BACKWARD, log_sigmoid_backward

aten = torch.ops.aten

# cuDNN prefers weights in one chunk, but each is a tensor of the graph
warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")

ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default
ATTENTION_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
LSTM = aten.mkldnn_rnn_layer.default
LSTM_BACKWARD = aten.mkldnn_rnn_layer_backward.default
LAYER_NORM_BACKWARD = aten.native_layer_norm_backward.default
RELU_MODE, TANH_MODE, LSTM_MODE, GRU_MODE = range(4)
_NUM_KEPT = (1, 1, 5, 4)  # a gate each, and the LSTM's cell, or the part of the GRU's new state that it resets
NUM_LSTM_TENSORS = 7  # input, two weights, two biases, output and cell: first among the arguments of both passes


def function_for(func: OpOverload, device: torch.device | None) -> Callable[..., Any]:
    """Returns the function that computes `func` on `device` (None: the CPU): its replacement there, else `func`."""
    replacements = _ON_CPU if device is None or device.type == "cpu" else _ELSEWHERE
    return replacements.get(func, func)


def workspace_bytes(input: Tensor, hidden_size: int, mode: int = LSTM_MODE) -> int:
    """Returns the least that a layer keeps for its backward pass; an LSTM, four gates and a cell per step and sequence.
    Kernels keep more, and differ: oneDNN keeps 15 values instead of 5 for 1,024 units, 35 steps and 64 sequences."""
    return _NUM_KEPT[mode] * math.prod(input.shape[:2]) * hidden_size * input.element_size()


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    shares_heads = key.shape[1] != query.shape[1]
    output = functional.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=shares_heads
    )
    sums = torch.promote_types(query.dtype, torch.float32)
    return output, torch.zeros(query.shape[:-1], dtype=sums, device=query.device)


def _attention_backward(grad_out: Tensor, *args: Any, **options: Any) -> Sequence[Tensor]:
    inputs, others = args[:3], args[5:]  # query, key, value; after output and logarithms of sums
    return _gradients(lambda *leaves: _attention(*leaves, *others, **options), inputs, (grad_out,))


def _attention_on_cpu(query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Any:
    run = ATTENTION if is_plain(query, value, *args[:1]) else _attention
    return run(query, key, value, *args, **options)


def is_plain(query: Tensor, value: Tensor, dropout: float = 0.0) -> bool:
    """Returns whether the CPU's kernel computes the attention: it has no dropout, and values as wide as queries."""
    return not dropout and query.shape[-1] == value.shape[-1]


def _attention_backward_on_cpu(grad_out: Tensor, *args: Any, **options: Any) -> Any:
    inputs, (output, logsumexp), others = args[:3], args[3:5], args[5:]
    if not is_plain(inputs[0], inputs[2], *others[:1]):
        return _attention_backward(grad_out, *args, **options)
    if not logsumexp.any():
        output, logsumexp = ATTENTION(*inputs, *others, **options)
    return ATTENTION_BACKWARD(grad_out, *inputs, output, logsumexp, *others, **options)


def _by_name(func: OpOverload, args: Sequence[Any]) -> dict[str, Any]:
    """Returns the arguments of a call by the names in the operator's schema."""
    return {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=True)}


def _lstm(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    input, w_ih, w_hh, b_ih, b_hh, hx, cx = args[:NUM_LSTM_TENSORS]
    options = _by_name(LSTM, args)
    has_biases, is_reversed, mode = options["has_biases"], options["reverse"], options["mode"]
    steps = input.flip(0) if is_reversed else input  # oneDNN has time first, even with `batch_first`
    weights = [w_ih, w_hh, *([b_ih, b_hh] if has_biases else [])]
    is_differentiated = w_hh.requires_grad
    if not is_differentiated:  # a model's own weights require gradients, by which PyTorch chooses how to multiply
        weights = [weight.detach().requires_grad_() for weight in weights]
    rest = weights, has_biases, 1, 0.0, options["train"], False, False
    with contextlib.nullcontext() if is_differentiated else torch.no_grad():
        if mode == LSTM_MODE:
            output, hy, cy = torch.lstm(steps, [hx.unsqueeze(0), cx.unsqueeze(0)], *rest)
        else:
            output, hy = _PLAIN_LAYERS[mode](steps, hx.unsqueeze(0), *rest)
            cy = torch.zeros_like(hy)  # there is no cell
    num_bytes = workspace_bytes(input, options["hidden_size"], mode) if torch.is_grad_enabled() else 0
    workspace = torch.zeros(num_bytes, dtype=torch.uint8, device=input.device)
    return output.flip(0) if is_reversed else output, hy.squeeze(0), cy.squeeze(0), workspace


def _is_native(input: Tensor, mode: int) -> bool:
    """Returns whether a layer is oneDNN's on CPUs: an LSTM in float32."""
    return mode == LSTM_MODE and input.dtype is torch.float32


def _lstm_on_cpu(*args: Any) -> Any:
    run = LSTM if _is_native(args[0], _by_name(LSTM, args)["mode"]) else _lstm
    return run(*args)


def _lstm_backward(*args: Any) -> Sequence[Tensor]:
    input, w_ih, w_hh, b_ih, b_hh, hx, cx = args[:NUM_LSTM_TENSORS]
    options = _by_name(LSTM_BACKWARD, args)
    gradients = [options[name] for name in ("grad_output", "grad_hy", "grad_cy")]
    forward_options = _forward_options(options | {"train": True})  # cuDNN needs it to differentiate

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        return _lstm(*tensors, *forward_options)[:3]

    biases = (b_ih, b_hh) if options["has_biases"] else (input.new_zeros(w_ih.shape[0]),) * 2
    return _gradients(run, (input, w_ih, w_hh, *biases, hx, cx), gradients)


def _forward_options(backward: Mapping[str, Any]) -> list[Any]:
    """Returns the forward pass's arguments after its tensors, from those of the backward pass by name."""
    return [backward[argument.name] for argument in LSTM._schema.arguments[NUM_LSTM_TENSORS:]]


def _lstm_backward_on_cpu(*args: Any) -> Any:
    *others, workspace = args
    if not _is_native(args[0], _by_name(LSTM_BACKWARD, args)["mode"]):
        return _lstm_backward(*args)
    if not workspace.any():
        with torch.enable_grad():  # or no workspace is made
            tensors, options = args[:NUM_LSTM_TENSORS], _forward_options(_by_name(LSTM_BACKWARD, args))
            workspace = LSTM(*tensors, *options)[3]
    return LSTM_BACKWARD(*others, workspace)


def _layer_norm_backward(
    grad_out: Tensor, input: Tensor, shape: Sequence[int], mean: Tensor, rstd: Tensor, *args: Any
) -> Any:
    sums = torch.promote_types(input.dtype, torch.float32)  # CPUs keep the mean of half types in half, GPUs read floats
    return LAYER_NORM_BACKWARD(grad_out, input, shape, mean.to(sums), rstd.to(sums), *args)


def _gradients(
    run: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> Sequence[Tensor]:
    """Returns the gradients of `inputs`, from those of the outputs of `run`; None: nothing depends on an output."""
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        pairs = [(out, grad) for out, grad in zip(run(*leaves), gradients, strict=False) if grad is not None]
        outputs, output_gradients = zip(*pairs, strict=True)
        return torch.autograd.grad(outputs, leaves, output_gradients, materialize_grads=True)


_PLAIN_LAYERS: Mapping[int, Callable[..., tuple[Tensor, Tensor]]] = {
    RELU_MODE: torch.rnn_relu,
    TANH_MODE: torch.rnn_tanh,
    GRU_MODE: torch.gru,
}
_ELSEWHERE: Mapping[OpOverload, Callable[..., Any]] = {
    ATTENTION: _attention,
    ATTENTION_BACKWARD: _attention_backward,
    LSTM: _lstm,
    LSTM_BACKWARD: _lstm_backward,
    LAYER_NORM_BACKWARD: _layer_norm_backward,
}
_ON_CPU: Mapping[OpOverload, Callable[..., Any]] = {
    **FUSED,
    LOG_SIGMOID_BACKWARD: log_sigmoid_backward,
    ATTENTION: _attention_on_cpu,
    ATTENTION_BACKWARD: _attention_backward_on_cpu,
    LSTM: _lstm_on_cpu,
    LSTM_BACKWARD: _lstm_backward_on_cpu,
}
