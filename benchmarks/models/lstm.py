"""A language model of PyTorch's own LSTM, which is one op on cards and many on processor cores."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gdp.models.papers.base import Example, ModelConfig, SoftmaxLoss, WordEmbedding


@dataclass(frozen=True, slots=True)
class LSTMConfig(ModelConfig):
    """Sizes of one batch and of the model."""

    batch_size: int
    num_layers: int = 2
    hidden: int = 384
    num_steps: int = 32
    vocabulary: int = 4000


class LSTM(nn.Module):
    """Tokens [batch, steps] and the tokens after them [batch, steps] -> mean cross-entropy."""

    def __init__(self, config: LSTMConfig) -> None:
        super().__init__()
        self.embedding = WordEmbedding(config.vocabulary, config.hidden, 0.1)
        self.layers = nn.LSTM(config.hidden, config.hidden, config.num_layers, batch_first=True)
        self.loss = SoftmaxLoss(config.hidden, config.vocabulary)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        states, _ = self.layers(self.embedding(tokens))
        return self.loss(states, targets)  # type: ignore[no-any-return]


def build(config: LSTMConfig) -> Example:
    """The model with one batch of random tokens."""
    tokens = torch.randint(config.vocabulary, (config.batch_size, config.num_steps + 1))
    return LSTM(config), (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), {}
