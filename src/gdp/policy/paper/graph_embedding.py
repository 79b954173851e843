"""GraphSAGE with max pooling: each op's vector, from its own features and those of ops up to L steps away.

Per iteration (Zhou et al., arXiv 1910.01578, "graph embedding"; Hamilton et al., arXiv 1706.02216, algorithm 1):

    h_N(v) = max over u in N(v) of sigmoid(W h_u + b)        elementwise; 0 where v has no neighbour
    h_v   <- f(concat(h_v, h_N(v)))                          f: affine, then ReLU

N ops, F input features, H hidden, E edges.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphEmbeddingConfig:
    """Sizes; the defaults are the published ones, recalled with low confidence."""

    num_layers: int = 4  # iterations: how many edges away an op sees
    hidden: int = 128

    def __post_init__(self) -> None:
        if min(self.num_layers, self.hidden) < 1:
            raise ValueError(f"{self}: at least one layer and one hidden unit are expected")


class _StrongestOffers(torch.autograd.Function):
    """The maximum over an op's edges; equal maxima share its gradient.

    The gradient of PyTorch's `scatter_reduce` is the same, but added a quarter to half to a training step.
    """

    @staticmethod
    def forward(context: Any, offered: Tensor, targets: Tensor, num_ops: int) -> Tensor:
        """Returns [N, H] from what is offered along the edges [E, H] and the ops that they lead to [E]."""
        pooled = offered.new_zeros(num_ops, offered.shape[1]).scatter_reduce(
            0, targets[:, None].expand_as(offered), offered, "amax", include_self=False
        )
        context.save_for_backward(offered, targets, pooled)
        return pooled

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        offered, targets, pooled = context.saved_tensors
        is_strongest = (offered == pooled.index_select(0, targets)).to(offered.dtype)
        num_strongest = torch.zeros_like(pooled).index_add_(0, targets, is_strongest)
        shares = gradient / num_strongest.clamp_min_(1)
        return is_strongest.mul_(shares.index_select(0, targets)), None, None


class MaxPoolLayer(nn.Module):
    """One iteration."""

    def __init__(self, num_inputs: int, config: GraphEmbeddingConfig) -> None:
        super().__init__()
        self.pool = nn.Linear(num_inputs, config.hidden)
        self.combine = nn.Linear(num_inputs + config.hidden, config.hidden)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """[N, H] from [N, F] and edges [2, E] (from, to)."""
        sources, targets = edge_index
        offered = torch.sigmoid(self.pool(x)).index_select(0, sources)
        pooled: Tensor = _StrongestOffers.apply(offered, targets, len(x))  # type: ignore[no-untyped-call]
        return torch.relu(self.combine(torch.cat((x, pooled), dim=-1)))


class GraphEmbedding(nn.Module):
    """L iterations. Relabelling ops permutes the rows of the result; a disconnected union has each part's own rows."""

    def __init__(self, num_inputs: int, config: GraphEmbeddingConfig) -> None:
        super().__init__()
        widths = [num_inputs, *[config.hidden] * (config.num_layers - 1)]
        self.layers = nn.ModuleList(MaxPoolLayer(width, config) for width in widths)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """[N, H] from features float32 [N, F] and edges int64 [2, E]: column (u, v) makes u a neighbour of v."""
        for layer in self.layers:
            x = layer(x, edge_index)
        return x
