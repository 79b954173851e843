"""`nn.LSTM`, `nn.GRU` and `nn.RNN`, captured with one op for each layer and direction. Cards run them by cuDNN, in all
types. CPUs have an operator of a whole layer for LSTMs in float32 alone, oneDNN's, and compute all others step by step;
PyTorch's decomposition, which fake tensors take, does so for an LSTM whose input requires a gradient too. So while a
step is captured, all are oneDNN's operator, whose argument `mode` says which layer it is; `replacements.py` executes
it. Layers whose states are projected stay as CPUs compute them."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from gdp.models.pytorch.autocast import kernels
from gdp.models.pytorch.replacements import (
    GRU_MODE,
    LSTM,
    LSTM_BACKWARD,
    LSTM_MODE,
    NUM_LSTM_TENSORS,
    RELU_MODE,
    TANH_MODE,
)

_MODES = {"lstm": LSTM_MODE, "gru": GRU_MODE, "rnn_tanh": TANH_MODE, "rnn_relu": RELU_MODE}


def layers_as_on_a_card() -> contextlib.AbstractContextManager[None]:
    """Makes each layer of a recurrent net an operator; the process has one such region at a time."""
    networks: list[tuple[str, Callable[..., Any], str]] = [
        (f"{name}.input", _network(name), "AutogradCPU") for name in _MODES
    ]
    return kernels([*networks, (LSTM_BACKWARD._schema.name, _gradient_shapes, "Meta")])


def _network(name: str) -> Callable[..., tuple[Tensor, ...]]:
    composed: Callable[..., tuple[Tensor, ...]] = getattr(torch.ops.aten, name).input.decompose
    mode = _MODES[name]

    def run(input: Tensor, state: Any, params: Sequence[Tensor], has_biases: bool, *options: Any) -> tuple[Tensor, ...]:
        states = state if mode == LSTM_MODE else [state]
        num_tensors = 4 if has_biases else 2
        is_projected = states[0].shape[-1] != params[1].shape[-1] or len(params) % num_tensors
        if not isinstance(input, FakeTensor) or is_projected:
            return composed(input, state, params, has_biases, *options)
        layers = [list(params[start : start + num_tensors]) for start in range(0, len(params), num_tensors)]
        output, *after = _layers(input, states, layers, mode, *options)
        return (output, *after) if mode == LSTM_MODE else (output, after[0])

    return run


def _gradient_shapes(*args: Any) -> tuple[Tensor, ...]:
    """Returns gradients without content; PyTorch's own takes all layers for LSTMs with biases."""
    return tuple(torch.empty_like(tensor) for tensor in args[:NUM_LSTM_TENSORS])


def _layers(
    input: Tensor,
    states: Sequence[Tensor],
    layers: Sequence[Sequence[Tensor]],
    mode: int,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the output and the states after all layers, given the weights of each layer and direction."""
    steps = (input.transpose(0, 1) if batch_first else input).contiguous()  # as cuDNN and oneDNN read them
    num_directions = 2 if bidirectional else 1
    hidden, cells = list[Tensor](), list[Tensor]()
    for layer in range(num_layers):
        outputs = list[Tensor]()
        for direction in range(num_directions):
            number = layer * num_directions + direction
            weights = layers[number]
            has_biases = len(weights) == 4
            biases = weights[2:] if has_biases else [weight.detach() for weight in weights]  # not read
            hx = states[0][number]
            cx = states[1][number] if mode == LSTM_MODE else hx.detach()  # there is no cell
            tensors = steps, *weights[:2], *biases, hx, cx
            options: tuple[Any, ...] = [], mode, hx.shape[-1], 1, has_biases, False, False, train
            output, hy, cy, _ = LSTM(*tensors, direction == 1, *options)
            outputs.append(output)
            hidden.append(hy)
            cells.append(cy)
        steps = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if dropout and train and layer < num_layers - 1:
            steps = torch.dropout(steps, dropout, train)
    cell = torch.stack(cells) if mode == LSTM_MODE else hidden[0]
    return steps.transpose(0, 1) if batch_first else steps, torch.stack(hidden), cell
