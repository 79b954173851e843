"""LSTM layers unrolled step by step, operator by operator, so that every time step can have its own device."""

# mypy: disable-error-code=no-any-return

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gdp.models.papers.base import WordEmbedding

State = tuple[Tensor, Tensor]  # output and cell, each [batch, hidden]


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
    """Dropout on the input, then an LSTM cell, then with `residual` the input added (width `hidden` on both sides). A
    `context` [batch, ...], if the layer was made with its width in `inputs`, joins the input but not the residual."""

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
