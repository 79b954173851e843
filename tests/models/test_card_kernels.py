"""Ops are captured, and cost, as a card runs them, wherever PyTorch has other code for CPUs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from gdp.models.pytorch import Capture, capture

IDS = torch.zeros(4, 5, dtype=torch.long)


class Calls(nn.Module):
    """A function of a parameter of this shape and the inputs."""

    def __init__(self, function: Callable[..., Any], *shape: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.zeros(*shape, dtype=dtype))

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self.weight, *inputs)


def costs(captured: Capture, kind: str) -> list[tuple[int, int]]:
    """(FLOPs, bytes) of each op of a kind."""
    graph = captured.graph
    amounts = zip(graph.kinds, graph.flops.tolist(), graph.bytes_accessed.tolist(), strict=True)
    return [(flops, num_bytes) for name, flops, num_bytes in amounts if name == f"aten.{kind}"]


@pytest.mark.parametrize(
    ("mode", "others"),
    [("sum", 2 * 32), ("mean", 2 * 32 + 160), ("max", 32 + 160 + 4 * 8 * 8)],  # sizes, bags of ids, maxima
)
def test_bags_read_rows(mode: str, others: int) -> None:
    """4 bags of 5 rows of 8 floats: 640 bytes, ids 160, offsets 32, 128 of results, and what the mode keeps."""
    bag = nn.EmbeddingBag(1000, 8, mode=mode)
    assert costs(capture(bag, (IDS,), training=False), "_embedding_bag") == [(20 * 8, 640 + 160 + 32 + 128 + others)]
    (forward,) = costs(capture(bag, (IDS,)), "_embedding_bag")
    assert forward == (20 * 8, 640 + 160 + 32 + 128 + others)


def test_weighted_bags_read_rows() -> None:
    """Weights of 20 rows: a product more; their gradient reads the rows, and a norm reads and writes them."""

    def function(weight: Tensor, table: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
        return functional.embedding_bag(ids, table, offsets, max_norm=1.0, mode="sum", per_sample_weights=weight)

    captured = capture(Calls(function, 20), (torch.zeros(1000, 8), IDS.flatten(), torch.arange(0, 20, 5)))
    rows, ids, offsets, bags = 640, 160, 32, 128
    (forward,) = costs(captured, "_embedding_bag")
    assert forward == (2 * 20 * 8, rows + ids + offsets + 80 + bags + 2 * 32)  # weights, sizes
    assert costs(captured, "embedding_renorm_") == [(3 * 20 * 8, 2 * rows + ids)]
    (backward,) = costs(captured, "_embedding_bag_per_sample_weights_backward")
    assert backward == (2 * 20 * 8, bags + rows + ids + offsets + 80)


def set_columns(table: Tensor, number: float) -> Tensor:
    table[:, IDS[0]] = number
    return table


ROWS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {  # of a table [1000, 8]; 5 ids are 40 bytes, a row 32
    "embedding": (lambda w: functional.embedding(IDS[0], w), 40 + 2 * 160),
    "index_select": (lambda w: w.index_select(0, IDS[0]), 40 + 2 * 160),
    "index": (lambda w: w[IDS[0]], 40 + 2 * 160),
    "gather": (lambda w: w.gather(0, IDS), 160 + 2 * 80),
    "take": (lambda w: w.take(IDS), 160 + 2 * 80),
    "put_": (lambda w: w.put_(IDS, torch.ones(4, 5)), 160 + 80 + 80),
    "index_fill_": (lambda w: w.index_fill_(0, IDS[0], 1.0), 40 + 160),
    "index_copy_": (lambda w: w.index_copy_(0, IDS[0], torch.ones(5, 8)), 40 + 2 * 160),
    "index_add_": (lambda w: w.index_add_(0, IDS[0], torch.ones(1, 8).expand(5, 8)), 40 + 32 + 2 * 160),
    "index_reduce_": (lambda w: w.index_reduce_(0, IDS[0], torch.ones(5, 8), "amax"), 40 + 3 * 160),
    "index_put_": (lambda w: w.index_put_((IDS[0],), torch.zeros(())), 40 + 4 + 160),
    "index_put_ columns": (lambda w: set_columns(w, 0.0), 40 + 4 + 4 * 1000 * 5),
    "scatter_": (lambda w: w.scatter_(0, IDS, 1.0), 160 + 80),
    "scatter_add_": (lambda w: w.scatter_add_(0, IDS, torch.ones(4, 5)), 160 + 80 + 2 * 80),
}


@pytest.mark.parametrize("case", ROWS)
def test_gathers_and_scatters_touch_rows(case: str) -> None:
    """Ops that index a table move the rows, the indices and the values, not the table."""
    function, num_bytes = ROWS[case]
    captured = capture(Calls(lambda w: function(w.detach()), 1000, 8), training=False)
    ((_, found),) = costs(captured, case.split()[0])
    assert found == num_bytes
    assert not captured.coverage.unknown
