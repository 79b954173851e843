"""GPT as Megatron-DeepSpeed computes it without flash attention: for the steps that were measured with it.

Attention is two batched products with softmax and dropout between them, in the type of the model; its fused
scale-mask-softmax is one operator, masked positions are computed. Loss in float32. M. Shoeybi et al., "Megatron-LM",
arXiv 1909.08053; its --attention-dropout and --hidden-dropout are those of `GPT2Config` by default. Tensors are
[steps, batch, hidden], so that heads need no copies.
"""

# mypy: disable-error-code=no-any-return

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.models.gpt2 import GPT2, GPT2Config
from benchmarks.models.transformer import SelfAttention
from gdp.models.papers.base import Example


class _UnfusedAttention(SelfAttention):
    """Multi-head attention with its scores in memory: [steps, batch, hidden] -> the same."""

    def __init__(self, hidden: int, num_heads: int, dropout: float) -> None:
        super().__init__(hidden, num_heads, causal=True)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        steps, batch, hidden = x.shape
        heads = self.query_key_value(x).view(steps, batch * self.num_heads, -1)
        query, key, value = (part.transpose(0, 1) for part in heads.chunk(3, dim=-1))
        scores = torch.bmm(query, key.transpose(1, 2))
        mixed = torch.bmm(self.dropout(torch.softmax(scores, dim=-1)), value)
        return self.output(mixed.transpose(0, 1).reshape(steps, batch, hidden))


class _BiasLater(nn.Linear):
    """A layer whose bias is added behind the product, and behind a sum over ranks (Megatron's `skip_bias_add`)."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight) + self.bias


class MegatronGPT(GPT2):
    """Tokens and next tokens, both [steps, batch] -> mean cross-entropy."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__(config)
        self.positions = nn.Parameter(self.positions.detach().unsqueeze(1))
        for layer in self.layers:
            layer.attention = _UnfusedAttention(config.hidden, config.num_heads, config.dropout)
            layer.attention.output = _BiasLater(config.hidden, config.hidden)
            feed_forward = layer.get_submodule("feed_forward")
            feed_forward.register_module("reduce", _BiasLater(4 * config.hidden, config.hidden))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(self.scores(tokens).float(), targets.flatten())


def build(config: GPT2Config, dtype: torch.dtype) -> Example:
    """Returns the model in `dtype` with one micro-batch of random tokens."""
    shape = config.num_steps, config.batch_size
    tokens, targets = (torch.randint(config.vocabulary, shape) for _ in range(2))
    return MegatronGPT(config).to(dtype), (tokens, targets), {}
