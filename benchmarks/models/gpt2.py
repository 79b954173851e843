"""GPT-2, a decoder whose word vectors are its softmax's too. Source: Radford et al. 2019, "Language Models are
Unsupervised Multitask Learners", section 2.3 and table 2; dropout as in GPT (Radford et al. 2018, section 4.1), except
in the attention, which is one fused operator.
"""

# mypy: disable-error-code=no-any-return

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.models.transformer import TransformerLayer, check_heads
from gdp.models.papers.base import Example, ModelConfig, WordEmbedding


@dataclass(frozen=True, slots=True)
class GPT2Config(ModelConfig):
    """Sizes of the model ("large": 36 layers of 1280) and of one batch."""

    batch_size: int
    num_layers: int = 36
    num_steps: int = 1024
    hidden: int = 1280
    num_heads: int = 20
    vocabulary: int = 50257
    dropout: float = 0.1

    def __post_init__(self) -> None:
        ModelConfig.__post_init__(self)
        check_heads(type(self).__name__, self.hidden, self.num_heads)


class GPT2(nn.Module):
    """Tokens and next tokens, both [batch, steps] -> mean cross-entropy."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.words = WordEmbedding(config.vocabulary, config.hidden, deviation=0.02)
        self.positions = nn.Parameter(torch.empty(config.num_steps, config.hidden).normal_(std=0.01))
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(
            TransformerLayer(config.hidden, config.num_heads, causal=True, dropout=config.dropout)
            for _ in range(config.num_layers)
        )
        self.norm = nn.LayerNorm(config.hidden)

    def scores(self, tokens: Tensor) -> Tensor:
        """Returns the scores of all words after each of the tokens: [tokens, vocabulary]."""
        x = self.dropout(self.words(tokens) + self.positions)
        for layer in self.layers:
            x = layer(x)
        return functional.linear(self.norm(x).flatten(0, -2), self.words.weight)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(self.scores(tokens), targets.flatten())


def build(config: GPT2Config) -> Example:
    """The model with one batch of random tokens."""
    shape = config.batch_size, config.num_steps
    tokens, targets = (torch.randint(config.vocabulary, shape) for _ in range(2))
    return GPT2(config), (tokens, targets), {}
