"""The body of GDP's placer: a Transformer-XL over ops in topological order, without positions.

Ops come in segments. At each layer a segment attends to itself and to that layer's input of the segment before, a
cache without gradient (Dai et al., arXiv 1901.02860, section 3.2; Zhou et al., arXiv 1910.01578, "placement
network"). Nothing is masked for coming later: all ops are placed at once.

              [ segment 0 ]     [ segment 1 ]     [ segment 2 ]
    layer 1         ^      .....>     ^      .....>     ^           ^   values and gradients
              [ segment 0 ]     [ segment 1 ]     [ segment 2 ]     ..> values only
    layer 0         ^      .....>     ^      .....>     ^
              [ segment 0 ]     [ segment 1 ]     [ segment 2 ]

A layer needs only the layer below, so it runs over all segments at once, without a loop.
N ops, H = d_model, S segments of L ops.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentTransformerConfig:
    """Sizes and variants; the defaults are the published ones where they are known.

    The sizes of the paper are recalled with low confidence; 64 does not divide by its 3 heads, hence 4 of 16 each.
    """

    num_layers: int = 2
    d_model: int = 64
    num_heads: int = 4
    feed_forward: int = 256  # 4 x d_model, the usual ratio; the paper gives none
    segment: int = 128  # ops
    attention: bool = True  # without: each layer is its feed-forward part alone, and no op sees another

    def __post_init__(self) -> None:
        if min(self.num_layers, self.d_model, self.num_heads, self.feed_forward, self.segment) < 1:
            raise ValueError(f"{self}: sizes of at least 1 are expected")
        if self.d_model % self.num_heads:
            raise ValueError(f"d_model {self.d_model} does not divide by num_heads {self.num_heads}; change one")


class SegmentAttention(nn.Module):
    """Attention of each segment to itself and to the one before it."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query = nn.Linear(d_model, d_model, bias=False)
        self.key_value = nn.Linear(d_model, 2 * d_model, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x: Tensor, cache: Tensor, visible: Tensor) -> Tensor:
        """Returns [S, L, H] from the same, the cache for the next segments, and `visible` [S, 1, 1, 2L]."""
        before = pad(cache[:-1], (0, 0, 0, 0, 1, 0))
        key, value = self.key_value(torch.cat((before, x), dim=1)).chunk(2, dim=-1)
        attended = scaled_dot_product_attention(
            self._heads(self.query(x)), self._heads(key), self._heads(value), attn_mask=visible
        )
        out: Tensor = self.out(attended.transpose(1, 2).reshape(x.shape))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        """[S, heads, length, H / heads] from [S, length, H]."""
        return x.view(*x.shape[:2], self.num_heads, -1).transpose(1, 2)


class SegmentLayer(nn.Module):
    """Attention, unless it is left out, then a feed-forward part; a residual sum around and a norm at each."""

    def __init__(self, config: SegmentTransformerConfig) -> None:
        super().__init__()
        width = config.d_model
        self.attention = SegmentAttention(width, config.num_heads) if config.attention else None
        self.attention_norm = nn.LayerNorm(width) if config.attention else None
        self.feed_forward = nn.Sequential(
            nn.Linear(width, config.feed_forward), nn.ReLU(), nn.Linear(config.feed_forward, width)
        )
        self.feed_forward_norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        """Returns [S, L, H] from the same and `visible`; parameters are trained through the cache too."""
        if self.attention is not None and self.attention_norm is not None:
            x = self.attention_norm(x + self.attention(x, x.detach(), visible))
        out: Tensor = self.feed_forward_norm(x + self.feed_forward(x))
        return out


class SegmentTransformer(nn.Module):
    """The layers, from op vectors to op vectors."""

    def __init__(self, config: SegmentTransformerConfig) -> None:
        super().__init__()
        self.segment = config.segment
        self.layers = nn.ModuleList(SegmentLayer(config) for _ in range(config.num_layers))

    def forward(self, x: Tensor, condition: Tensor | None = None) -> Tensor:
        """Returns [N, H] from the same; `condition` [N, H] multiplies every layer's input (see `Superposition`)."""
        num_ops = len(x)
        length = min(self.segment, num_ops)
        factor = 1 if condition is None else _segments(condition, length)
        own = _segments(torch.ones(num_ops, 1, device=x.device), length)[..., 0] > 0
        # which ops are there, in the segment before and in the segment itself
        visible = torch.cat((pad(own[:-1], (0, 0, 1, 0)), own), dim=1)[:, None, None]
        x = _segments(x, length)
        for layer in self.layers:
            x = layer(factor * x, visible)
        return x.flatten(0, 1)[:num_ops]


class Superposition(nn.Module):
    """A `SegmentTransformer` whose layers are conditioned on its input, called like one: feature conditioning.

        x^(l+1) = g^(l)( c(x^(0)) * x^(l) )

    x^(0) is the graph representation, g^(l) the l-th layer of the placer, c one extra transformer layer, and `*` is
    elementwise (Zhou et al., arXiv 1910.01578, "batch training"). Without it c = 1: a plain `SegmentTransformer`.
    """

    def __init__(self, config: SegmentTransformerConfig) -> None:
        super().__init__()
        self.conditioning = SegmentTransformer(replace(config, num_layers=1))
        self.placer = SegmentTransformer(config)

    def forward(self, x: Tensor) -> Tensor:
        """Returns [N, H] from the same."""
        out: Tensor = self.placer(x, self.conditioning(x))
        return out


def _segments(x: Tensor, length: int) -> Tensor:
    """[S, L, H] from [N, H], zeros behind the last op."""
    return pad(x, (0, 0, 0, -len(x) % length)).view(-1, length, x.shape[1])
