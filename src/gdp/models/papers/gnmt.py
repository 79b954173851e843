"""GNMT: Google's recurrent translation model, unrolled. Source: Wu et al. 2016 (arXiv 1609.08144), sections 3 and 8.
Encoder: a bidirectional layer, then unidirectional ones. Decoder: the bottom layer's last output asks the attention
(normalised Bahdanau, as in the reference implementation), whose answer joins the input of every decoder layer. Residual
connections from the third layer on."""

# mypy: disable-error-code=no-any-return

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gdp.models.papers.base import Example, ModelConfig, SoftmaxLoss
from gdp.models.papers.lstm import LSTMLayer, State, StepEmbedding, unroll

FIRST_RESIDUAL_LAYER = 2


@dataclass(frozen=True, slots=True)
class GNMTConfig(ModelConfig):
    """Sizes of the model (as many decoder as encoder layers) and of one batch (targets as long as sources)."""

    num_layers: int
    batch_size: int
    num_steps: int = 40
    hidden: int = 1024
    vocabulary: int = 32000
    dropout: float = 0.2


class BidirectionalLayer(nn.Module):
    """Two LSTM layers, one over the reversed steps: steps x [batch, inputs] -> steps x [batch, 2 * hidden]."""

    def __init__(self, inputs: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.forwards = LSTMLayer(inputs, hidden, dropout)
        self.backwards = LSTMLayer(inputs, hidden, dropout)

    def forward(self, steps: Sequence[Tensor]) -> list[Tensor]:
        pairs = zip(unroll(self.forwards, steps), unroll(self.backwards, steps[::-1])[::-1], strict=True)
        return [torch.cat(pair, dim=1) for pair in pairs]


class Encoder(nn.Module):
    """Source tokens [steps, batch] -> steps x [batch, hidden], or twice as wide with a single layer."""

    def __init__(self, config: GNMTConfig) -> None:
        super().__init__()
        hidden = config.hidden
        self.embedding = StepEmbedding(config.vocabulary, hidden)
        self.layers = nn.ModuleList([BidirectionalLayer(hidden, hidden, config.dropout)])
        for number in range(1, config.num_layers):
            inputs = 2 * hidden if number == 1 else hidden
            self.layers.append(LSTMLayer(inputs, hidden, config.dropout, residual=number >= FIRST_RESIDUAL_LAYER))

    def forward(self, tokens: Tensor) -> list[Tensor]:
        steps: list[Tensor] = self.layers[0](self.embedding(tokens))
        for layer in list(self.layers)[1:]:
            assert isinstance(layer, LSTMLayer)
            steps = unroll(layer, steps)
        return steps


class NormalizedBahdanauAttention(nn.Module):
    """Additive attention with a score vector of learnt length: query [batch, hidden] -> context [batch, values]. `keys`
    and `score_vector()` do not depend on the query: the caller computes them once. Source: Bahdanau et al. 2015 (arXiv
    1409.0473); weight normalisation of Salimans and Kingma 2016 (arXiv 1602.07868)."""

    def __init__(self, hidden: int, values: int) -> None:
        super().__init__()
        self.keys = nn.Linear(values, hidden)
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.direction = nn.Parameter(torch.empty(hidden).uniform_(-0.1, 0.1))
        self.length = nn.Parameter(torch.full((1,), hidden**-0.5))

    def score_vector(self) -> Tensor:
        return self.direction * (self.length / self.direction.norm())

    def forward(self, query: Tensor, keys: Tensor, values: Tensor, score_vector: Tensor) -> Tensor:
        scores = (self.query(query).unsqueeze(1) + keys).tanh() @ score_vector  # [batch, source steps]
        return (scores.softmax(dim=1).unsqueeze(1) @ values).squeeze(1)


class Decoder(nn.Module):
    """Target tokens and next tokens [steps, batch], encoder outputs [batch, source steps, values] -> cross-entropy."""

    def __init__(self, config: GNMTConfig, values: int) -> None:
        super().__init__()
        hidden = config.hidden
        self.hidden = hidden
        self.embedding = StepEmbedding(config.vocabulary, hidden)
        self.attention = NormalizedBahdanauAttention(hidden, values)
        self.layers = nn.ModuleList(
            LSTMLayer(hidden + values, hidden, config.dropout, residual=number >= FIRST_RESIDUAL_LAYER)
            for number in range(config.num_layers)
        )
        self.softmax = SoftmaxLoss(hidden, config.vocabulary)

    def forward(self, tokens: Tensor, targets: Tensor, values: Tensor) -> Tensor:
        keys, score_vector = self.attention.keys(values), self.attention.score_vector()
        query = values.new_zeros(values.shape[0], self.hidden)
        states: list[State | None] = [None] * len(self.layers)
        losses = []
        for x, target in zip(self.embedding(tokens), targets.unbind(0), strict=True):
            context = self.attention(query, keys, values, score_vector)
            for number, layer in enumerate(self.layers):
                x, states[number] = layer(x, states[number], context)
                if number == 0:
                    query = x
            losses.append(self.softmax(x, target))
        return torch.stack(losses).mean()


class GNMT(nn.Module):
    """Source tokens, target tokens and next target tokens, all [steps, batch] -> mean cross-entropy."""

    def __init__(self, config: GNMTConfig) -> None:
        super().__init__()
        self.encoder = Encoder(config)
        self.decoder = Decoder(config, values=config.hidden * (2 if config.num_layers == 1 else 1))

    def forward(self, sources: Tensor, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.decoder(tokens, targets, torch.stack(self.encoder(sources), dim=1))


def build(config: GNMTConfig) -> Example:
    """The model with one batch of random sentences."""
    shape = config.num_steps, config.batch_size
    sources, tokens, targets = (torch.randint(config.vocabulary, shape) for _ in range(3))
    return GNMT(config), (sources, tokens, targets), {}
