"""Parts of the plain transformers: attention, feed-forward, and the layer with normalisation before each."""

# mypy: disable-error-code=no-any-return

from torch import Tensor, nn
from torch.nn import functional

from gdp.errors import InputError


def check_heads(name: str, hidden: int, num_heads: int) -> None:
    """Raises InputError unless the heads divide the hidden size evenly."""
    if hidden % num_heads:
        raise InputError(f"{name}: hidden is {hidden}; a multiple of num_heads ({num_heads}) is expected")


class SelfAttention(nn.Module):
    """Multi-head attention in one fused operator, without dropout: [batch, steps, hidden] -> the same."""

    def __init__(self, hidden: int, num_heads: int, *, causal: bool) -> None:
        super().__init__()
        self.num_heads, self.causal = num_heads, causal
        self.query_key_value = nn.Linear(hidden, 3 * hidden)
        self.output = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in self.query_key_value(x).chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.output(mixed.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """Two linear layers with GELU (Hendrycks and Gimpel 2016, arXiv 1606.08415) between them."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.expand = nn.Linear(hidden, inner)
        self.reduce = nn.Linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.reduce(functional.gelu(self.expand(x)))


class TransformerLayer(nn.Module):
    """Attention and feed-forward (four times as wide), each with normalisation before it and a residual connection."""

    def __init__(self, hidden: int, num_heads: int, *, causal: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden)
        self.attention = SelfAttention(hidden, num_heads, causal=causal)
        self.feed_forward_norm = nn.LayerNorm(hidden)
        self.feed_forward = FeedForward(hidden, 4 * hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))
