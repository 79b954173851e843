"""A graph network with mean messages over random edges: gathers, sums by index and linear layers. Source: Hamilton et
al. 2017 (arXiv 1706.02216), GraphSAGE.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from gdp.models.papers.base import Example, ModelConfig


@dataclass(frozen=True, slots=True)
class GraphNetConfig(ModelConfig):
    """Sizes of one batch of graphs, all of the same numbers of nodes and edges, and of the model."""

    batch_size: int
    num_layers: int = 4
    hidden: int = 192
    num_features: int = 64
    num_nodes: int = 256
    num_edges: int = 2048
    num_classes: int = 16


class GraphNet(nn.Module):
    """Features [batch, nodes, features], edges [batch, edges, 2], labels [batch, nodes] -> mean cross-entropy."""

    def __init__(self, config: GraphNetConfig) -> None:
        super().__init__()
        self.inputs = nn.Linear(config.num_features, config.hidden)
        self.layers = nn.ModuleList(nn.Linear(2 * config.hidden, config.hidden) for _ in range(config.num_layers))
        self.classifier = nn.Linear(config.hidden, config.num_classes)

    def forward(self, features: Tensor, edges: Tensor, labels: Tensor) -> Tensor:
        x = functional.relu(self.inputs(features))
        source, target = (ends.unsqueeze(2).expand(-1, -1, x.shape[2]) for ends in edges.unbind(2))
        degree = torch.zeros_like(x).scatter_add(1, target, torch.ones_like(target, dtype=x.dtype)).clamp(min=1)
        for layer in self.layers:
            messages = torch.zeros_like(x).scatter_add(1, target, x.gather(1, source)) / degree
            x = functional.relu(layer(torch.cat((x, messages), dim=2)))
        return functional.cross_entropy(self.classifier(x).flatten(0, 1), labels.flatten())


def build(config: GraphNetConfig) -> Example:
    """The model with one batch of random graphs."""
    batch, nodes = config.batch_size, config.num_nodes
    edges = torch.randint(nodes, (batch, config.num_edges, 2))
    labels = torch.randint(config.num_classes, (batch, nodes))
    return GraphNet(config), (torch.randn(batch, nodes, config.num_features), edges, labels), {}
