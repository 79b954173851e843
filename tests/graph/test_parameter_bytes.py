"""Bytes of a trained parameter are those that the optimizer and the types of a step take."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gdp
from gdp.graph import Graph
from gdp.graph.parameter_bytes import ParameterBytes
from gdp.models.pytorch import capture, capture_fn
from gdp.parallel.layout import Layout
from gdp.parallel.step import Step


def net(dtype: torch.dtype, *, train_all: bool = True) -> Any:
    """Two layers of 4,160 parameters each."""
    layers = nn.Sequential(nn.Linear(64, 64, dtype=dtype), nn.ReLU(), nn.Linear(64, 64, dtype=dtype))
    layers[0].requires_grad_(train_all)
    return layers, (torch.randn(8, 64, dtype=dtype),)


class Autocast(nn.Module):
    """The net under autocast, its weights in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net(torch.float32)[0]

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return self.net(x).float().mean()


HALF, FLOAT = (lambda: net(torch.bfloat16)), (lambda: net(torch.float32))
MIXED = "bf16 weights and gradients, float32 master weights and moments"


@pytest.mark.parametrize(
    ("build", "precision", "optimizer", "total", "types"),
    [
        # 2 + 2 of bfloat16, 4 of the copy, 2 x 4 of the moments
        (HALF, "mixed", "adamw", 16.0, MIXED),
        (lambda: net(torch.bfloat16, train_all=False), "mixed", "adam", 16.0, MIXED),
        (HALF, "pure-bf16", "adam", 8.0, "bf16 weights, gradients and moments"),
        (FLOAT, "float32", "adam", 16.0, "float32 weights, gradients and moments"),
        (lambda: (Autocast(), (torch.randn(8, 64),)), "mixed", "adam", 16.0, "float32 weights, gradients and moments"),
        (HALF, "mixed", "sgd", 8.0, "bf16 weights and gradients, float32 master weights"),
        (HALF, "mixed", "sgd-momentum", 12.0, "bf16 weights and gradients, float32 master weights and momentum"),
        (HALF, "pure-bf16", "sgd", 4.0, "bf16 weights and gradients"),
        # a weight of 4,096: two moments of a byte with 4 bytes for 256 elements each; a bias of 64: two of 4 bytes
        (HALF, "mixed", "adam-8bit", 8 + (4096 * (2 + 1 / 32) + 64 * 8) / 4160, "8-bit moments"),
    ],
)
def test_bytes_by_hand(build: Callable[[], Any], precision: str, optimizer: str, total: float, types: str) -> None:
    """Weights, gradients, copies and state of a trained parameter add up; frozen ones do not count."""
    each = ParameterBytes.of(capture_fn(build, name="net", optimizer=optimizer, precision=precision).graph)
    assert each is not None
    assert each.total == pytest.approx(total, abs=2e-3)
    assert each.types.endswith(types)


@cache
def half_step() -> Graph:
    return capture(*HALF(), name="net", precision="mixed").graph


@pytest.mark.parametrize("layout", ["data=2", "data=2,microbatches=2,zero=1", "data=2,zero=2", "data=2,zero=3"])
def test_a_layout_takes_the_same_bytes(layout: str) -> None:
    """What replicas share counts once, whatever ZeRO cuts."""
    each = ParameterBytes.of(Step.of(half_step(), Layout.parse(layout)).graph)
    assert each is not None
    assert (each.types, each.total) == (MIXED, pytest.approx(16.0, abs=0.01))


def test_inference_has_none() -> None:
    """A forward pass has no bytes of trained parameters."""
    assert ParameterBytes.of(capture(*HALF(), name="net", training=False).graph) is None


@pytest.mark.parametrize(
    ("build", "precision", "message"),
    [
        (HALF, "float32", "precision float32, and 0 computes in bfloat16 as it is written"),
        (FLOAT, "mixed", "here all is in other types; leave it out, or give the model in bfloat16"),
        (FLOAT, "pure-bf16", "precision pure-bf16 is for weights in bfloat16; give the model in bfloat16"),
        (FLOAT, "half", "precision is 'half'; one of mixed, pure-bf16, float32 is expected"),
    ],
)
def test_precisions_that_a_module_lacks(build: Callable[[], Any], precision: str, message: str) -> None:
    """A module is not converted in Python: another precision than its own is refused."""
    with pytest.raises(gdp.InputError, match=message):
        capture(*build(), precision=precision)


def test_a_module_in_half_precision_is_noted() -> None:
    """Weights that are trained in bfloat16 without copies are said, unless the precision is."""
    (note,) = capture(*HALF()).notes
    assert note.startswith("weights are trained in bfloat16 as the model is written, without float32 copies")
    assert capture(*HALF(), precision="pure-bf16").notes == ()
