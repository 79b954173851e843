"""GPT as Megatron-DeepSpeed computes it without flash attention: for the steps that were measured with it.

Attention is two batched products with softmax and dropout between them, in the type of the model; its fused
scale-mask-softmax is one operator, masked positions are computed. Loss in float32. M. Shoeybi et al., "Megatron-LM",
arXiv 1909.08053. Tensors are [steps, batch, hidden], so that heads need no copies.
"""

# mypy: disable-error-code=no-any-return

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from gdp.models.workloads.base import Dropout, Example, WordEmbedding, check_config, random_tokens
from gdp.models.workloads.transformer import SelfAttention, TransformerLayer, check_heads

_DROPOUT = 0.1  # Megatron's default of --attention-dropout and --hidden-dropout


@dataclass(frozen=True, slots=True)
class MegatronGPTConfig:
    """Sizes of the model and of a micro-batch."""

    batch_size: int
    num_layers: int
    num_steps: int
    hidden: int
    num_heads: int
    vocabulary: int

    def __post_init__(self) -> None:
        check_config(self)
        check_heads(type(self).__name__, self.hidden, self.num_heads)


class _UnfusedAttention(SelfAttention):
    """Multi-head attention with its scores in memory: [steps, batch, hidden] -> the same."""

    def __init__(self, hidden: int, num_heads: int) -> None:
        super().__init__(hidden, num_heads, causal=True)
        self.dropout = Dropout(_DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        steps, batch, hidden = x.shape
        heads = self.query_key_value(x).view(steps, batch * self.num_heads, -1)
        query, key, value = (part.transpose(0, 1) for part in heads.chunk(3, dim=-1))
        scores = torch.bmm(query, key.transpose(1, 2))
        mixed = torch.bmm(self.dropout(torch.softmax(scores, dim=-1)), value)
        return self.output(mixed.transpose(0, 1).reshape(steps, batch, hidden))


class MegatronGPT(nn.Module):
    """Tokens and next tokens, both [steps, batch] -> mean cross-entropy."""

    def __init__(self, config: MegatronGPTConfig) -> None:
        super().__init__()
        self.words = WordEmbedding(config.vocabulary, config.hidden, deviation=0.02)
        self.positions = nn.Parameter(torch.empty(config.num_steps, 1, config.hidden).normal_(std=0.02))
        self.dropout = Dropout(_DROPOUT)
        self.layers = nn.ModuleList(
            TransformerLayer(config.hidden, config.num_heads, causal=True, dropout=_DROPOUT)
            for _ in range(config.num_layers)
        )
        for layer in self.layers:
            layer.attention = _UnfusedAttention(config.hidden, config.num_heads)
        self.norm = nn.LayerNorm(config.hidden)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.dropout(self.words(tokens) + self.positions)
        for layer in self.layers:
            x = layer(x)
        scores = functional.linear(self.norm(x).flatten(0, -2), self.words.weight)
        return functional.cross_entropy(scores.float(), targets.flatten())


def build(config: MegatronGPTConfig, dtype: torch.dtype) -> Example:
    """Returns the model in `dtype` with one micro-batch of random tokens."""
    shape = config.num_steps, config.batch_size
    tokens, targets = (random_tokens(config.vocabulary, *shape) for _ in range(2))
    return MegatronGPT(config).to(dtype), (tokens, targets), {}
