"""T5, an encoder and a decoder that attends to it. Source: Raffel et al. 2019 (arXiv 1910.10683), section 2.1; details
from the authors' release (T5 1.0).

Word vectors are shared by both and the softmax; the bias of relative positions by all layers of one of them.
"""

# mypy: disable-error-code=no-any-return

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from gdp.models.papers.base import Example, ModelConfig, WordEmbedding

NUM_BUCKETS, MAX_DISTANCE = 32, 128  # section 2.1


@dataclass(frozen=True, slots=True)
class T5Config(ModelConfig):
    """Sizes of the model ("base": 12 + 12 layers of 768) and of one batch (`num_steps` in and out)."""

    batch_size: int
    num_layers: int = 12
    num_steps: int = 512
    hidden: int = 768
    num_heads: int = 12
    head: int = 64
    inner: int = 3072
    vocabulary: int = 32128
    dropout: float = 0.1


class RelativeBias(nn.Module):
    """The bias on the scores of queries and keys, by their distance: -> [1, heads, steps, steps].

    The smaller half of the distances have a bucket each, the others logarithmic ones, and all beyond MAX_DISTANCE the
    last. With `causal`, later keys are masked; else half of the buckets are for them.
    """

    def __init__(self, num_heads: int, *, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.biases = WordEmbedding(NUM_BUCKETS, num_heads, deviation=1.0)

    def forward(self, num_steps: int, device: torch.device) -> Tensor:
        steps = torch.arange(num_steps, device=device)
        ahead = steps.unsqueeze(0) - steps.unsqueeze(1)  # key minus query
        num_buckets = NUM_BUCKETS if self.causal else NUM_BUCKETS // 2
        distance = (-ahead).clamp(min=0) if self.causal else ahead.abs()
        exact = num_buckets // 2
        scale = (num_buckets - exact) / math.log(MAX_DISTANCE / exact)
        far = exact + ((distance.clamp(min=1) / exact).log() * scale).long()
        bucket = torch.where(distance < exact, distance, far.clamp(max=num_buckets - 1))
        if not self.causal:
            bucket = bucket + num_buckets * (ahead > 0)
        bias = self.biases(bucket).permute(2, 0, 1).unsqueeze(0)
        return bias.masked_fill(ahead > 0, -torch.inf) if self.causal else bias


class T5Attention(nn.Module):
    """x [batch, steps, hidden] attends to `memory` [batch, steps, hidden], its scores not scaled."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.num_heads, width = config.num_heads, config.num_heads * config.head
        self.query, self.key, self.value = (nn.Linear(config.hidden, width, bias=False) for _ in range(3))
        self.output = nn.Linear(width, config.hidden, bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, memory: Tensor, bias: Tensor | None) -> Tensor:
        query, key, value = (
            projection(states).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for projection, states in ((self.query, x), (self.key, memory), (self.value, memory))
        )
        scores = query @ key.transpose(-2, -1)
        weights = self.dropout((scores if bias is None else scores + bias).softmax(dim=-1))
        return self.output((weights @ value).transpose(1, 2).flatten(-2))


class T5FeedForward(nn.Module):
    """Two linear layers with a rectifier between them, no biases."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.expand = nn.Linear(config.hidden, config.inner, bias=False)
        self.reduce = nn.Linear(config.inner, config.hidden, bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.reduce(self.dropout(self.expand(x).relu()))


def root_mean_square_norm(config: T5Config) -> nn.RMSNorm:
    """Layer normalisation without mean and bias."""
    return nn.RMSNorm(config.hidden, eps=1e-6)


class T5Layer(nn.Module):
    """Attention to itself, in a decoder to the encoder too, feed-forward: each a residual with normalisation first."""

    def __init__(self, config: T5Config, *, is_decoder: bool) -> None:
        super().__init__()
        self.attention_norm, self.attention = root_mean_square_norm(config), T5Attention(config)
        self.cross_norm = root_mean_square_norm(config) if is_decoder else None
        self.cross = T5Attention(config) if is_decoder else None
        self.feed_forward_norm, self.feed_forward = root_mean_square_norm(config), T5FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, bias: Tensor, memory: Tensor | None) -> Tensor:
        normed = self.attention_norm(x)
        x = x + self.dropout(self.attention(normed, normed, bias))
        if self.cross is not None and self.cross_norm is not None:
            x = x + self.dropout(self.cross(self.cross_norm(x), memory, None))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class Stack(nn.Module):
    """Word vectors [batch, steps, hidden], for a decoder the encoder's output -> [batch, steps, hidden]."""

    def __init__(self, config: T5Config, *, is_decoder: bool) -> None:
        super().__init__()
        self.bias = RelativeBias(config.num_heads, causal=is_decoder)
        self.layers = nn.ModuleList(T5Layer(config, is_decoder=is_decoder) for _ in range(config.num_layers))
        self.norm = root_mean_square_norm(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        x, bias = self.dropout(x), self.bias(x.shape[1], x.device)
        for layer in self.layers:
            x = layer(x, bias, memory)
        return self.dropout(self.norm(x))


class T5(nn.Module):
    """Source, target and next target tokens, all [batch, steps] -> mean cross-entropy."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.words = WordEmbedding(config.vocabulary, config.hidden, deviation=1.0)
        self.encoder = Stack(config, is_decoder=False)
        self.decoder = Stack(config, is_decoder=True)
        self.scale = config.hidden**-0.5

    def forward(self, sources: Tensor, tokens: Tensor, targets: Tensor) -> Tensor:
        memory = self.encoder(self.words(sources))
        states = self.decoder(self.words(tokens), memory) * self.scale
        return functional.cross_entropy(functional.linear(states.flatten(0, 1), self.words.weight), targets.flatten())


def build(config: T5Config) -> Example:
    """The model with one batch of random tokens."""
    shape = config.batch_size, config.num_steps
    sources, tokens, targets = (torch.randint(config.vocabulary, shape) for _ in range(3))
    return T5(config), (sources, tokens, targets), {}
