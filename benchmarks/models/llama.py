"""A Llama-style decoder. Source: Touvron et al. 2023 (arXiv 2302.13971, 2307.09288); default sizes: TinyLlama 1.1B
(Zhang et al. 2024, arXiv 2401.02385).
"""

# mypy: disable-error-code=no-any-return

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from gdp.errors import InputError
from gdp.models.papers.base import Example, ModelConfig, SoftmaxLoss, WordEmbedding

ROTARY_BASE = 10000.0  # Su et al. 2021, arXiv 2104.09864


@dataclass(frozen=True, slots=True)
class LlamaConfig(ModelConfig):
    """Sizes of the model and of one batch."""

    batch_size: int
    num_layers: int = 22
    num_steps: int = 1024
    hidden: int = 2048
    num_heads: int = 32
    num_key_heads: int = 4
    inner: int = 5632
    vocabulary: int = 32000

    def __post_init__(self) -> None:
        ModelConfig.__post_init__(self)
        check_heads(type(self).__name__, self.hidden, self.num_heads, self.num_key_heads)


def check_heads(name: str, hidden: int, num_heads: int, num_key_heads: int) -> None:
    """Raises InputError unless the heads divide the hidden size evenly and the key heads the heads."""
    if hidden % (2 * num_heads):
        raise InputError(f"{name}: hidden is {hidden}; a multiple of 2 * num_heads ({2 * num_heads}) is expected")
    if num_heads % num_key_heads:
        raise InputError(f"{name}: num_key_heads is {num_key_heads}; a divisor of num_heads ({num_heads}) is expected")


class Rotary(nn.Module):
    """Rotary positions for hidden states [batch, steps, hidden]: cosines and sines, both [steps, head]."""

    def __init__(self, head: int) -> None:
        super().__init__()
        self.head = head

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        exponents = torch.arange(0, self.head, 2, dtype=x.dtype, device=x.device) / self.head
        angles = torch.outer(torch.arange(x.shape[1], dtype=x.dtype, device=x.device), ROTARY_BASE**-exponents)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair (x[i], x[i + head / 2]) of [..., steps, head] by its position's angle."""
    first, second = x.chunk(2, dim=-1)
    return x * rotary[0] + torch.cat((-second, first), dim=-1) * rotary[1]


class GroupedQueryAttention(nn.Module):
    """Causal attention with rotary positions, key heads shared by groups of query heads: [batch, steps, hidden]."""

    def __init__(self, hidden: int, num_heads: int, num_key_heads: int) -> None:
        super().__init__()
        self.head = hidden // num_heads
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key = nn.Linear(hidden, num_key_heads * self.head, bias=False)
        self.value = nn.Linear(hidden, num_key_heads * self.head, bias=False)
        self.output = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(
            rotate(query, rotary), rotate(key, rotary), value, is_causal=True, enable_gqa=True
        )
        return self.output(mixed.transpose(1, 2).flatten(-2))


class SwiGLU(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv 2002.05202): [..., hidden] -> [..., hidden]."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, inner, bias=False)
        self.up = nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class LlamaLayer(nn.Module):
    """Attention and feed-forward, each with normalisation before it and a residual connection."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden, eps=1e-5)
        self.attention = GroupedQueryAttention(config.hidden, config.num_heads, config.num_key_heads)
        self.feed_forward_norm = nn.RMSNorm(config.hidden, eps=1e-5)
        self.feed_forward = SwiGLU(config.hidden, config.inner)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotary)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(nn.Module):
    """Tokens and next tokens, both [batch, steps] -> mean cross-entropy."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embedding = WordEmbedding(config.vocabulary, config.hidden, deviation=0.02)
        self.rotary = Rotary(config.hidden // config.num_heads)
        self.layers = nn.ModuleList(LlamaLayer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden, eps=1e-5)
        self.softmax = SoftmaxLoss(config.hidden, config.vocabulary)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        rotary = self.rotary(x)
        for layer in self.layers:
            x = layer(x, rotary)
        return self.softmax(self.norm(x), targets)


def build(config: LlamaConfig) -> Example:
    """The model with one batch of random tokens."""
    shape = config.batch_size, config.num_steps
    tokens, targets = (torch.randint(config.vocabulary, shape) for _ in range(2))
    return Llama(config), (tokens, targets), {}
