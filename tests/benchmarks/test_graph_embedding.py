"""The graph embedding is the published formula, sees no op numbers, and takes several graphs at once."""

import pytest
import torch
from torch import Tensor

from benchmarks.gdp_policy.graph_embedding import GraphEmbedding, GraphEmbeddingConfig, MaxPoolLayer

EDGES = [(0, 1), (0, 2), (1, 3), (2, 3), (3, 4), (5, 4), (0, 4)]  # and op 6 has no neighbour
CONFIG = GraphEmbeddingConfig(num_layers=3, hidden=8)


def both_ways(edges: list[tuple[int, int]]) -> Tensor:
    return torch.tensor([*edges, *((target, source) for source, target in edges)]).T


def embedding() -> GraphEmbedding:
    torch.manual_seed(0)
    return GraphEmbedding(5, CONFIG)


def test_layers_are_the_published_formula() -> None:
    """Each layer equals the formula of the paper, op by op."""
    network, x, edge_index = embedding(), torch.randn(7, 5), both_ways(EDGES)
    expected = x
    for layer in network.layers:
        rows = []
        for op in range(7):
            pooled = [torch.sigmoid(layer.pool(expected[u])) for u, v in edge_index.T.tolist() if v == op]
            strongest = torch.stack(pooled).amax(dim=0) if pooled else torch.zeros(8)
            rows.append(torch.relu(layer.combine(torch.cat((expected[op], strongest)))))
        expected = torch.stack(rows)
    torch.testing.assert_close(network(x, edge_index), expected)


def test_relabelling_ops_permutes_their_vectors() -> None:
    """An op's vector does not depend on its number."""
    network, x, edge_index = embedding(), torch.randn(7, 5), both_ways(EDGES)
    order = torch.randperm(7)  # new op i is old op order[i]
    edges = torch.argsort(order)[edge_index][:, torch.randperm(edge_index.shape[1])]
    torch.testing.assert_close(network(x[order], edges), network(x, edge_index)[order])


def test_unions_keep_vectors_apart() -> None:
    """A union of graphs has each graph's own vectors."""
    network, x, edge_index = embedding(), torch.randn(7, 5), both_ways(EDGES)
    other, path = torch.randn(3, 5), both_ways([(0, 1), (1, 2)])
    together = network(torch.cat((x, other)), torch.cat((edge_index, path + 7), dim=1))
    torch.testing.assert_close(together, torch.cat((network(x, edge_index), network(other, path))))


def test_equal_neighbours_share_the_gradient() -> None:
    """Gradients are those of PyTorch's `scatter_reduce`, where neighbours have equal maxima too."""
    layer, edge_index = MaxPoolLayer(2, GraphEmbeddingConfig(num_layers=1, hidden=8)), both_ways(EDGES)
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [3.0, 4.0], [1.0, 2.0], [5.0, 0.0], [5.0, 0.0], [0.0, 0.0]])
    sources, targets = edge_index
    offered = torch.sigmoid(layer.pool(x))[sources]
    pooled = torch.zeros(7, 8).scatter_reduce(
        0, targets[:, None].expand_as(offered), offered, "amax", include_self=False
    )
    expected = torch.relu(layer.combine(torch.cat((x, pooled), dim=1)))
    parameters, weights = list(layer.parameters()), torch.randn(7, 8)
    gradients = [torch.autograd.grad((out * weights).sum(), parameters) for out in (expected, layer(x, edge_index))]
    torch.testing.assert_close(gradients[1], gradients[0])


def test_ops_without_neighbours_are_finite() -> None:
    """Ops without neighbours have finite vectors and gradients."""
    network, x = embedding(), torch.randn(4, 5, requires_grad=True)
    out = network(x, torch.zeros((2, 0), dtype=torch.int64))
    out.sum().backward()
    assert x.grad is not None
    assert out.isfinite().all()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("wrong", [{"num_layers": 0}, {"hidden": 0}])
def test_impossible_sizes_are_refused(wrong: dict[str, int]) -> None:
    """The error names the size."""
    with pytest.raises(ValueError, match=next(iter(wrong))):
        GraphEmbeddingConfig(**wrong)
