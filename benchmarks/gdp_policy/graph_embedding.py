"""GraphSAGE with max pooling: each op's vector, from its own features and those of ops up to L steps away.

Per iteration (Zhou et al., arXiv 1910.01578, "graph embedding"; Hamilton et al., arXiv 1706.02216, algorithm 1):

    h_N(v) = max over u in N(v) of sigmoid(W h_u + b)        elementwise; 0 where v has no neighbour
    h_v   <- f(concat(h_v, h_N(v)))                          f: affine, then ReLU

N ops, F input features, H hidden, E edges.
"""

from dataclasses import dataclass

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
        # of equal maxima each has a share of the gradient
        pooled = offered.new_zeros(len(x), offered.shape[1]).scatter_reduce(
            0, targets[:, None].expand_as(offered), offered, "amax", include_self=False
        )
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
