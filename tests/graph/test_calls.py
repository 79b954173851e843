"""Calls of layers, on a model that calls its layers several times."""

import numpy as np
import torch
from torch import Tensor, nn

from gdp.graph.layers import NO_CALL, calls_of
from gdp.models.pytorch import capture
from problems import heavy_layers

CALLS = 4


class Reader(nn.Module):
    """Two layers read each part of a text; the first also sees what it made of the part before, without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, text: Tensor) -> Tensor:
        before, losses = torch.zeros_like(text[0]), []
        for part in text.unbind(0):
            read = self.first(part + before).relu()
            before = read.detach()
            losses.append(self.second(read).square().mean())
        return torch.stack(losses).mean()


def test_ops_of_a_part_of_the_text_are_of_its_call() -> None:
    """Forward and backward ops, in modules and between them; parameters and updates are of no call."""
    graph = capture(Reader(), (torch.randn(CALLS, 2, 8),), name="reader").graph
    call = calls_of(graph)
    assert call is not None
    kinds = np.array(graph.kinds)
    for kind, count in (("aten.addmm", 2), ("aten.relu", 1), ("aten.mm", 3), ("aten.threshold_backward", 1)):
        assert np.bincount(call[kinds == kind]).tolist() == [count] * CALLS, kind
    shared = graph.is_in_phase("update") | (graph.resident_bytes > 0)
    assert (call[shared] == NO_CALL).all()


def test_layers_called_once() -> None:
    """Layers that are called once have no calls."""
    assert calls_of(heavy_layers()) is None
