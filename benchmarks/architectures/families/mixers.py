"""Layers that mix steps: kinds of attention, and mixers without attention. All map [batch, steps, width] to itself."""

import torch
from torch import Tensor, nn
from torch.nn import functional

ATTENTIONS = ("fused", "explicit", "biased", "few_keys", "linear", "window")
MIXERS = (*ATTENTIONS, "tokens", "convolution", "pool", "gate")
CAUSAL_MIXERS = ("fused", "explicit", "biased", "few_keys", "window", "convolution")
WINDOWS = 4  # into which the steps are cut


class DrawnAttention(nn.Module):
    """Self-attention of `kind`, or attention to `memory` [batch, others, width]."""

    def __init__(self, kind: str, width: int, num_heads: int, num_steps: int, *, is_causal: bool) -> None:
        super().__init__()
        self.kind, self.num_heads, self.is_causal = kind, num_heads, is_causal
        self.num_keys = 1 if kind == "few_keys" else num_heads
        self.head = width // num_heads
        self.query = nn.Linear(width, width)
        self.keys = nn.Linear(width, 2 * self.num_keys * self.head, bias=False)
        self.output = nn.Linear(width, width)
        if kind == "biased":
            self.bias = nn.Parameter(torch.zeros(num_heads, num_steps, num_steps))

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        source = x if memory is None else memory
        batch, steps, width = x.shape
        query = self.query(x).view(batch, steps, self.num_heads, self.head).transpose(1, 2)
        both = self.keys(source).view(batch, source.shape[1], 2, self.num_keys, self.head)
        keys, values = (part.squeeze(2).transpose(1, 2) for part in both.split(1, dim=2))
        return self.output(self._mixed(query, keys, values).transpose(1, 2).reshape(batch, steps, width))

    def _mixed(self, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        attend = functional.scaled_dot_product_attention
        if self.kind == "linear":  # Katharopoulos et al. 2020 (arXiv 2006.16236)
            query, keys = functional.elu(query) + 1, functional.elu(keys) + 1
            totals = query @ keys.sum(2, keepdim=True).transpose(2, 3)
            return (query @ (keys.transpose(2, 3) @ values)) / totals
        if self.kind in ("fused", "few_keys"):
            keys, values = (part.expand(-1, self.num_heads, -1, -1) for part in (keys, values))
            return attend(query, keys, values, is_causal=self.is_causal)
        if self.kind == "window":
            shape = query.shape
            cut = (shape[0], shape[1] * WINDOWS, -1, shape[3])
            query, keys, values = (part.reshape(cut) for part in (query, keys, values))
            return attend(query, keys, values, is_causal=self.is_causal).reshape(shape)
        scores = (query @ keys.transpose(2, 3)) * self.head**-0.5
        scores = scores + self.bias if self.kind == "biased" else scores
        if self.is_causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(later, -1e9)
        return scores.softmax(3) @ values


class TokenMixer(nn.Module):
    """A perceptron over steps, a convolution, pooling, or a gate over steps."""

    def __init__(self, kind: str, width: int, num_steps: int, *, is_causal: bool) -> None:
        super().__init__()
        self.kind = kind
        if kind == "tokens":
            self.first, self.last = nn.Linear(num_steps, 2 * num_steps), nn.Linear(2 * num_steps, num_steps)
        elif kind == "gate":
            self.first, self.last = nn.Linear(width, 2 * width), nn.Linear(width, width)
            self.over_steps = nn.Linear(num_steps, num_steps)
        elif kind == "convolution":
            self.depthwise = nn.Conv1d(width, width, 5, padding=4 if is_causal else 2, groups=width)
            self.last = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "tokens":
            return self.last(functional.gelu(self.first(x.transpose(1, 2)))).transpose(1, 2)
        if self.kind == "gate":
            one, other = self.first(x).chunk(2, dim=2)
            return self.last(one * self.over_steps(other.transpose(1, 2)).transpose(1, 2))
        if self.kind == "convolution":
            return self.last(self.depthwise(x.transpose(1, 2))[:, :, : x.shape[1]].transpose(1, 2))
        return functional.avg_pool1d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2) - x


def mixer(kind: str, width: int, num_heads: int, num_steps: int, *, is_causal: bool) -> nn.Module:
    """Returns the mixer of `kind`."""
    if kind in ATTENTIONS:
        return DrawnAttention(kind, width, num_heads, num_steps, is_causal=is_causal)
    return TokenMixer(kind, width, num_steps, is_causal=is_causal)
