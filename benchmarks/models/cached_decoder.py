"""A decoder whose layers append the tokens' keys and values to given ones, as a server's cache does."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from gdp.models.papers.base import Example, ModelConfig, SoftmaxLoss, WordEmbedding


@dataclass(frozen=True, slots=True)
class CachedDecoderConfig(ModelConfig):
    """Sizes of one batch and of the model."""

    batch_size: int
    num_layers: int = 4
    hidden: int = 320
    num_heads: int = 5
    num_steps: int = 48
    num_cached: int = 192
    vocabulary: int = 4000


class Layer(nn.Module):
    """Normalise first; attention to the cache and to the tokens; two linear layers."""

    def __init__(self, config: CachedDecoderConfig) -> None:
        super().__init__()
        hidden = config.hidden
        self.num_heads = config.num_heads
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))
        self.queries_keys_values = nn.Linear(hidden, 3 * hidden)
        self.output = nn.Linear(hidden, hidden)
        self.inner = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(2, (self.num_heads, -1)).transpose(1, 2)
            for part in self.queries_keys_values(self.norms[0](x)).chunk(3, dim=2)
        )
        keys, values = torch.cat((keys, key), dim=2), torch.cat((values, value), dim=2)
        found = functional.scaled_dot_product_attention(query, keys, values)
        x = x + self.output(found.transpose(1, 2).flatten(2))
        return x + self.inner(self.norms[1](x))  # type: ignore[no-any-return]


class CachedDecoder(nn.Module):
    """Tokens and targets [batch, steps], cache [batch, layers, 2, heads, cached, width] -> mean cross-entropy."""

    def __init__(self, config: CachedDecoderConfig) -> None:
        super().__init__()
        self.embedding = WordEmbedding(config.vocabulary, config.hidden, 0.1)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.loss = SoftmaxLoss(config.hidden, config.vocabulary)

    def forward(self, tokens: Tensor, targets: Tensor, cache: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer, (keys, values) in zip(self.layers, (part.unbind(1) for part in cache.unbind(1)), strict=True):
            x = layer(x, keys, values)
        return self.loss(x, targets)  # type: ignore[no-any-return]


def build(config: CachedDecoderConfig) -> Example:
    """The model with one batch of random tokens and a random cache."""
    tokens = torch.randint(config.vocabulary, (config.batch_size, config.num_steps + 1))
    width = config.hidden // config.num_heads
    cache = torch.randn(config.batch_size, config.num_layers, 2, config.num_heads, config.num_cached, width)
    return CachedDecoder(config), (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), cache), {}
