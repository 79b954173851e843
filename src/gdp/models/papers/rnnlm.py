"""RNNLM: a large LSTM language model, unrolled. Sources: Zaremba et al. 2014 (arXiv 1409.2329), layers and dropout;
Jozefowicz et al. 2016 (arXiv 1602.02410), a hidden size of 2048. A softmax per time step, as in the unrolled TensorFlow
graphs that the placement papers use."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gdp.models.papers.base import Example, ModelConfig, SoftmaxLoss
from gdp.models.papers.lstm import LSTMLayer, State, StepEmbedding


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
        hidden = config.hidden
        self.layers = nn.ModuleList(LSTMLayer(hidden, hidden, config.dropout) for _ in range(config.num_layers))
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
