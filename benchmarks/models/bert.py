"""BERT in pre-training: masked words, and whether one sentence follows the other. Source: Devlin et al. 2018
(arXiv 1810.04805), section 3 and appendix A; operators and order of layers from the authors' release.

The vectors of the words, at the very beginning, are the weights of the softmax, at the very end.
"""

# mypy: disable-error-code=no-any-return

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.models.transformer import FeedForward, check_heads
from gdp.errors import InputError
from gdp.models.papers.base import Example, ModelConfig, WordEmbedding

DEVIATION = 0.02
NUM_SEGMENTS = 2


@dataclass(frozen=True, slots=True)
class BERTConfig(ModelConfig):
    """Sizes of the model ("large": 24 layers of 1024) and of one batch, `num_masked` words a row to predict."""

    batch_size: int
    num_layers: int = 24
    num_steps: int = 512
    num_masked: int = 76
    hidden: int = 1024
    num_heads: int = 16
    vocabulary: int = 30522
    dropout: float = 0.1

    def __post_init__(self) -> None:
        ModelConfig.__post_init__(self)
        check_heads(type(self).__name__, self.hidden, self.num_heads)
        if self.num_masked > self.num_steps:
            raise InputError(
                f"BERTConfig: num_masked is {self.num_masked}; at most num_steps ({self.num_steps}) is expected"
            )


class BERTAttention(nn.Module):
    """Multi-head attention with dropout on its weights: [batch, steps, hidden] -> the same."""

    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        self.num_heads, self.head = config.num_heads, config.hidden // config.num_heads
        self.query, self.key, self.value, self.output = (nn.Linear(config.hidden, config.hidden) for _ in range(4))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            projection(x).unflatten(-1, (self.num_heads, self.head)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        weights = self.dropout((query @ key.transpose(-2, -1) * self.head**-0.5).softmax(dim=-1))
        return self.output((weights @ value).transpose(1, 2).flatten(-2))


class BERTLayer(nn.Module):
    """Attention and feed-forward, each with dropout, a residual connection and normalisation after it."""

    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        self.attention = BERTAttention(config)
        self.attention_norm = nn.LayerNorm(config.hidden, eps=1e-12)
        self.feed_forward = FeedForward(config.hidden, 4 * config.hidden)
        self.feed_forward_norm = nn.LayerNorm(config.hidden, eps=1e-12)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention_norm(x + self.dropout(self.attention(x)))
        return self.feed_forward_norm(x + self.dropout(self.feed_forward(x)))


class BERTEmbedding(nn.Module):
    """Tokens and segments, both [batch, steps] -> [batch, steps, hidden]."""

    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        self.words = WordEmbedding(config.vocabulary, config.hidden, DEVIATION)
        self.segments = WordEmbedding(NUM_SEGMENTS, config.hidden, DEVIATION)
        self.positions = nn.Parameter(torch.empty(config.num_steps, config.hidden).normal_(std=DEVIATION))
        self.norm = nn.LayerNorm(config.hidden, eps=1e-12)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens: Tensor, segments: Tensor) -> Tensor:
        return self.dropout(self.norm(self.words(tokens) + self.segments(segments) + self.positions))


class BERT(nn.Module):
    """Tokens and segments [batch, steps], places of the masked words and the words themselves [batch, masked], and
    whether the second sentence follows [batch] -> sum of both mean cross-entropies.
    """

    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        self.embedding = BERTEmbedding(config)
        self.layers = nn.ModuleList(BERTLayer(config) for _ in range(config.num_layers))
        self.pooler = nn.Linear(config.hidden, config.hidden)
        self.follows = nn.Linear(config.hidden, 2)
        self.masked = nn.Linear(config.hidden, config.hidden)
        self.masked_norm = nn.LayerNorm(config.hidden, eps=1e-12)
        self.masked_bias = nn.Parameter(torch.zeros(config.vocabulary))

    def forward(self, tokens: Tensor, segments: Tensor, places: Tensor, words: Tensor, follows: Tensor) -> Tensor:
        x = self.embedding(tokens, segments)
        for layer in self.layers:
            x = layer(x)
        next_loss = functional.cross_entropy(self.follows(self.pooler(x[:, 0]).tanh()), follows)
        chosen = x.gather(1, places.unsqueeze(-1).expand(-1, -1, x.shape[-1])).flatten(0, 1)
        states = self.masked_norm(functional.gelu(self.masked(chosen)))
        scores = functional.linear(states, self.embedding.words.weight, self.masked_bias)
        return functional.cross_entropy(scores, words.flatten()) + next_loss


def build(config: BERTConfig) -> Example:
    """The model with one batch of random sentences."""
    shape = config.batch_size, config.num_steps
    tokens, segments = torch.randint(config.vocabulary, shape), torch.randint(NUM_SEGMENTS, shape)
    places = torch.rand(shape).argsort(dim=1)[:, : config.num_masked]
    words = torch.randint(config.vocabulary, (config.batch_size, config.num_masked))
    return BERT(config), (tokens, segments, places, words, torch.randint(2, (config.batch_size,))), {}
