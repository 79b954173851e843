"""Transformer-XL, several segments of the recurrence unrolled. Source: Dai et al. 2019 (arXiv 1901.02860), section 3. A
segment attends to itself and to the previous segment's hidden states, which get no gradient; positions are relative.
Sizes of a layer: the large WikiText-103 model's (hidden 1024, 16 heads, inner 4096), with a plain softmax."""

# mypy: disable-error-code=no-any-return

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from gdp.errors import InputError
from gdp.models.papers.base import Example, ModelConfig, SoftmaxLoss, WordEmbedding


@dataclass(frozen=True, slots=True)
class TransformerXLConfig(ModelConfig):
    """Sizes of the model and of one batch; segment and memory are 384 long, as in training the large model."""

    num_layers: int
    batch_size: int
    num_segments: int = 8
    segment_steps: int = 384
    hidden: int = 1024
    num_heads: int = 16
    inner: int = 4096
    vocabulary: int = 32000
    dropout: float = 0.2

    def __post_init__(self) -> None:
        ModelConfig.__post_init__(self)
        if self.hidden % (2 * self.num_heads):
            raise InputError(f"TransformerXLConfig: hidden is {self.hidden}; a multiple of 2 * num_heads is expected")


class RelativeAttention(nn.Module):
    """Multi-head attention with relative positions (section 3.3 and appendix B): x [Q, batch, hidden] -> the same. Q
    queries, K = 2 Q keys (memory, then x), `positions` [K, hidden], `future` [Q, K] true where a key comes later. In
    the formulas: q query, k key, b batch, n head, d place in a head."""

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__()
        hidden, self.num_heads = config.hidden, config.num_heads
        self.head = hidden // self.num_heads
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key_value = nn.Linear(hidden, 2 * hidden, bias=False)
        self.position = nn.Linear(hidden, hidden, bias=False)
        self.content_bias = nn.Parameter(torch.empty(self.num_heads, self.head).normal_(std=0.02))
        self.position_bias = nn.Parameter(torch.empty(self.num_heads, self.head).normal_(std=0.02))
        self.output = nn.Linear(hidden, hidden, bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, memory: Tensor, positions: Tensor, future: Tensor) -> Tensor:
        num_queries, batch = x.shape[:2]
        query = self.query(x).view(num_queries, batch, self.num_heads, self.head)
        keys_values = self.key_value(torch.cat((memory, x)))
        key, value = keys_values.view(len(positions), batch, 2, self.num_heads, self.head).unbind(2)
        position = self.position(positions).view(len(positions), self.num_heads, self.head)
        by_content = torch.einsum("qbnd,kbnd->bnqk", query + self.content_bias, key)
        by_position = torch.einsum("qbnd,knd->bnqk", query + self.position_bias, position)
        scores = (by_content + relative_shift(by_position)) * self.head**-0.5
        weights = self.dropout(scores.masked_fill(future, -torch.inf).softmax(dim=-1))
        return self.output(torch.einsum("bnqk,kbnd->qbnd", weights, value).reshape(x.shape))


def relative_shift(scores: Tensor) -> Tensor:
    """[..., Q, K] scores by distance, row i shifted left by Q - 1 - i places, so that columns become keys (appendix B).
    What enters on the right belongs to future keys and must be masked."""
    *outer, num_queries, num_keys = scores.shape
    padded = functional.pad(scores, (1, 0)).view(*outer, num_keys + 1, num_queries)
    return padded.narrow(-2, 1, num_keys).reshape(scores.shape)


class TransformerXLFeedForward(nn.Module):
    """Two linear layers with a rectifier between them: [..., hidden] -> [..., hidden]."""

    def __init__(self, hidden: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.expand = nn.Linear(hidden, inner)
        self.reduce = nn.Linear(inner, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.reduce(self.dropout(self.expand(x).relu()))


class TransformerXLLayer(nn.Module):
    """Attention and feed-forward, each with dropout, a residual connection and normalisation after it."""

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__()
        self.attention = RelativeAttention(config)
        self.attention_norm = nn.LayerNorm(config.hidden)
        self.feed_forward = TransformerXLFeedForward(config.hidden, config.inner, config.dropout)
        self.feed_forward_norm = nn.LayerNorm(config.hidden)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, memory: Tensor, positions: Tensor, future: Tensor) -> Tensor:
        x = self.attention_norm(x + self.dropout(self.attention(x, memory, positions, future)))
        return self.feed_forward_norm(x + self.dropout(self.feed_forward(x)))


class SegmentEmbedding(nn.Module):
    """Tokens [segments * steps, batch] -> vectors [steps, batch, hidden] for each segment."""

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__()
        self.num_segments = config.num_segments
        self.words = WordEmbedding(config.vocabulary, config.hidden, deviation=1.0)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens: Tensor) -> tuple[Tensor, ...]:
        return self.dropout(self.words(tokens)).chunk(self.num_segments)


class TransformerXL(nn.Module):
    """Tokens and next tokens [segments * steps, batch], memory [layers, steps, batch, hidden] -> mean cross-entropy."""

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__()
        self.num_segments, self.segment_steps = config.num_segments, config.segment_steps
        self.embedding = SegmentEmbedding(config)
        self.layers = nn.ModuleList(TransformerXLLayer(config) for _ in range(config.num_layers))
        self.softmax = SoftmaxLoss(config.hidden, config.vocabulary)

    def forward(self, tokens: Tensor, targets: Tensor, memory: Tensor) -> Tensor:
        steps = self.segment_steps
        positions = sinusoids(2 * steps, memory.shape[-1], memory)
        future = torch.ones(steps, 2 * steps, dtype=torch.bool, device=memory.device).triu(1 + steps)
        memories, losses = list(memory.unbind(0)), []
        for x, target in zip(self.embedding(tokens), targets.chunk(self.num_segments), strict=True):
            for number, layer in enumerate(self.layers):
                memories[number], x = x.detach(), layer(x, memories[number], positions, future)
            losses.append(self.softmax(x, target))
        return torch.stack(losses).mean()


def sinusoids(num_positions: int, hidden: int, like: Tensor) -> Tensor:
    """[num_positions, hidden] position vectors, the greatest distance first, of the type and device of `like`."""
    distances = torch.arange(num_positions - 1, -1, -1, dtype=like.dtype, device=like.device)
    exponents = torch.arange(0, hidden, 2, dtype=like.dtype, device=like.device) / hidden
    angles = torch.outer(distances, 10000.0**-exponents)
    return torch.cat((angles.sin(), angles.cos()), dim=1)


def build(config: TransformerXLConfig) -> Example:
    """The model with one batch of random tokens and a random memory."""
    shape = config.num_segments * config.segment_steps, config.batch_size
    memory = torch.randn(config.num_layers, config.segment_steps, config.batch_size, config.hidden)
    tokens, targets = (torch.randint(config.vocabulary, shape) for _ in range(2))
    return TransformerXL(config), (tokens, targets, memory), {}
