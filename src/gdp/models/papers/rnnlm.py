"""RNNLM: a large LSTM language model, unrolled step by step, operator by operator: each step can have its own device.

Sources: Zaremba et al. 2014 (arXiv 1409.2329), layers and dropout; Jozefowicz et al. 2016 (arXiv 1602.02410), a hidden
size of 2048. A softmax per time step, as in the unrolled TensorFlow graphs that the placement papers use.
"""

# mypy: disable-error-code=no-any-return

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gdp.models.papers.base import Example, ModelConfig, SoftmaxLoss, WordEmbedding

State = tuple[Tensor, Tensor]
"""Output and cell, each [batch, hidden]."""


class StepEmbedding(nn.Module):
    """Tokens [steps, batch] -> vectors [batch, hidden] for each step."""

    def __init__(self, vocabulary: int, hidden: int) -> None:
        super().__init__()
        self.words = WordEmbedding(vocabulary, hidden, deviation=0.1)

    def forward(self, tokens: Tensor) -> tuple[Tensor, ...]:
        return self.words(tokens).unbind(0)


class LSTMCell(nn.Module):
    """One step of an LSTM (Hochreiter and Schmidhuber 1997, with forget gate): x [batch, inputs] -> State."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.input_gates = nn.Linear(inputs, 4 * hidden)
        self.state_gates = nn.Linear(hidden, 4 * hidden, bias=False)

    def forward(self, x: Tensor, state: State) -> State:
        output, cell = state
        gates = self.input_gates(x) + self.state_gates(output)
        write, forget, candidate, read = gates.chunk(4, dim=1)
        cell = forget.sigmoid() * cell + write.sigmoid() * candidate.tanh()
        return read.sigmoid() * cell.tanh(), cell


class LSTMLayer(nn.Module):
    """Dropout on the input, then an LSTM cell, then with `residual` the input added (width `hidden` on both sides).

    A `context` [batch, ...], if the layer was made with its width in `inputs`, joins the input but not the residual.
    """

    def __init__(self, inputs: int, hidden: int, dropout: float, *, residual: bool = False) -> None:
        super().__init__()
        self.hidden, self.residual = hidden, residual
        self.dropout = nn.Dropout(dropout)
        self.cell = LSTMCell(inputs, hidden)

    def forward(self, x: Tensor, state: State | None, context: Tensor | None = None) -> tuple[Tensor, State]:
        if state is None:
            zeros = x.new_zeros(x.shape[0], self.hidden)
            state = zeros, zeros
        joined = x if context is None else torch.cat((x, context), dim=1)
        state = self.cell(self.dropout(joined), state)
        return (state[0] + x if self.residual else state[0]), state


def unroll(layer: LSTMLayer, steps: Sequence[Tensor]) -> list[Tensor]:
    """The layer's outputs for the inputs `steps`, from a zero state."""
    state, outputs = None, []
    for x in steps:
        x, state = layer(x, state)
        outputs.append(x)
    return outputs


@dataclass(frozen=True, slots=True)
class RNNLMConfig(ModelConfig):
    """Sizes of the model and of one batch."""

    num_layers: int
    batch_size: int
    num_steps: int = 40
    hidden: int = 2048
    vocabulary: int = 32000
    dropout: float = 0.25


class RNNLM(nn.Module):
    """Tokens and next tokens, both [steps, batch] -> mean cross-entropy."""

    def __init__(self, config: RNNLMConfig) -> None:
        super().__init__()
        self.embedding = StepEmbedding(config.vocabulary, config.hidden)
        self.layers = nn.ModuleList(
            LSTMLayer(config.hidden, config.hidden, config.dropout) for _ in range(config.num_layers)
        )
        self.softmax = SoftmaxLoss(config.hidden, config.vocabulary)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        states: list[State | None] = [None] * len(self.layers)
        losses = []
        for x, target in zip(self.embedding(tokens), targets.unbind(0), strict=True):
            for number, layer in enumerate(self.layers):
                x, states[number] = layer(x, states[number])
            losses.append(self.softmax(x, target))
        return torch.stack(losses).mean()


def build(config: RNNLMConfig) -> Example:
    """The model with one batch of random tokens."""
    shape = config.num_steps, config.batch_size
    return RNNLM(config), (torch.randint(config.vocabulary, shape), torch.randint(config.vocabulary, shape)), {}
