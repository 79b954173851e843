"""FLOPs of products are those that PyTorch counts in a real run on a CPU, for forty small models, but for conventions.

`torch.utils.flop_counter` counts matrix products and convolutions alone. gdp counts more in the same ops, and this is
taken away before both are compared:

- one for the bias of each output of a product (`addmm`) or convolution, and for its gradient in the latter;
- of attention five for a softmax of each pair of tokens, nine for it and its gradient.

PyTorch counts the gradient of the weights of a grouped convolution once for each group; it is taken once here.

Fused attention computes the scores again in its backward pass: ten products in place of the eight of separate ones,
which a CPU runs here, for PyTorch counts nothing for its fused kernel of CPUs.
"""

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from gdp.models.pytorch import Capture, capture

X, IMAGE, SIGNAL, VOLUME = (8, 16), (2, 4, 12, 12), (2, 4, 20), (2, 4, 6, 6, 6)
TOKENS = (2, 10, 16)
PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "addbmm", "convolution", "convolution_backward")


class Calls(nn.Module):
    """A function of modules and an input."""

    def __init__(self, function: Callable[..., Tensor], *modules: nn.Module) -> None:
        super().__init__()
        self.parts, self.function = nn.ModuleList(modules), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.parts)


class Weight(nn.Module):
    """A parameter that a function multiplies with."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape))


def unrolled(cell: nn.Module) -> nn.Module:
    def run(x: Tensor, cell: nn.Module) -> Tensor:
        state = cell(x)
        state = cell(x, state)
        result: Tensor = state[0] if isinstance(state, tuple) else state
        return result

    return Calls(run, cell)


def attend(x: Tensor, projection: nn.Module, *, heads: int = 2, groups: int = 2, causal: bool = False) -> Tensor:
    width = x.shape[-1] // heads
    q, k, v = projection(x).split([heads * width, groups * width, groups * width], -1)
    q, k, v = (part.unflatten(-1, (-1, width)).transpose(1, 2) for part in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=groups < heads)


def linear(*widths: int, bias: bool = True) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(a, b, bias=bias) for a, b in pairwise(widths)])


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: linear(16, 32), X),
    "linear without bias": (lambda: linear(16, 32, bias=False), X),
    "perceptron": (lambda: nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4)), X),
    "of tokens": (lambda: linear(16, 32, 8), TOKENS),
    "tied": (lambda: Calls(lambda x, a: functional.linear(a(x), a.weight.t()), nn.Linear(16, 32)), X),
    "low rank": (lambda: Calls(lambda x, a, b: a(x) + b(x), nn.Linear(16, 8), linear(16, 2, 8, bias=False)), X),
    "product of batches": (lambda: Calls(lambda x, a: x @ a(x).mT, nn.Linear(16, 16)), TOKENS),
    "broadcast product": (lambda: Calls(lambda x, w: x @ w.weight, Weight(16, 8)), TOKENS),
    "einsum": (lambda: Calls(lambda x, w: torch.einsum("bti,hij->bhtj", x, w.weight), Weight(3, 16, 8)), TOKENS),
    "outer": (lambda: Calls(lambda x, w: torch.einsum("bi,j->bij", x, w.weight), Weight(5)), X),
    "baddbmm": (lambda: Calls(lambda x, w: torch.baddbmm(x, w.weight, x), Weight(2, 10, 10)), TOKENS),
    "matrix and vector": (lambda: Calls(lambda x, w: x @ w.weight, Weight(16)), TOKENS),
    "chain": (lambda: Calls(lambda x, w: torch.linalg.multi_dot([x, w.weight, w.weight]), Weight(16, 16)), X),
    "layer norm": (lambda: nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 4)), X),
    "rms norm": (lambda: nn.Sequential(nn.Linear(16, 16), nn.RMSNorm(16)), X),
    "dropout": (lambda: nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 4)), X),
    "gru cell": (lambda: unrolled(nn.GRUCell(16, 8)), X),
    "lstm cell": (lambda: unrolled(nn.LSTMCell(16, 8)), X),
    "rnn cell": (lambda: unrolled(nn.RNNCell(16, 8)), X),
    "checkpoint": (
        lambda: Calls(
            lambda x, a, b: b(checkpoint(a, a[0](x), use_reentrant=False)), linear(16, 16, 16), linear(16, 4)
        ),
        X,
    ),
    "convolution": (lambda: nn.Conv2d(4, 8, 3), IMAGE),
    "convolution without bias": (lambda: nn.Conv2d(4, 8, 3, bias=False), IMAGE),
    "strided": (lambda: nn.Conv2d(4, 8, 3, stride=2, padding=1), IMAGE),
    "dilated": (lambda: nn.Conv2d(4, 8, 3, dilation=2), IMAGE),
    "grouped": (lambda: nn.Conv2d(4, 8, 3, groups=2), IMAGE),
    "depthwise": (lambda: nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 8, 1)), IMAGE),
    "channels last": (lambda: nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last), IMAGE),
    "one dimension": (lambda: nn.Conv1d(4, 8, 5), SIGNAL),
    "three dimensions": (lambda: nn.Conv3d(4, 8, 3), VOLUME),
    "transposed": (lambda: nn.ConvTranspose2d(4, 8, 3, stride=2), IMAGE),
    "transposed in one dimension": (lambda: nn.ConvTranspose1d(4, 8, 4, stride=2), SIGNAL),
    "transposed, grouped": (lambda: nn.ConvTranspose2d(4, 8, 3, groups=2), IMAGE),
    "residual block": (
        lambda: Calls(
            lambda x, a, b: x + b(functional.relu(a(x))),
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)),
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)),
        ),
        IMAGE,
    ),
    "squeeze and excite": (
        lambda: Calls(
            lambda x, a: x * a(x.mean((2, 3)))[..., None, None], nn.Sequential(*linear(4, 2, 4), nn.Sigmoid())
        ),
        IMAGE,
    ),
    "up and down": (
        lambda: Calls(
            lambda x, a, b: b(functional.interpolate(a(x), scale_factor=2.0)),
            nn.Conv2d(4, 8, 3, stride=2, padding=1),
            nn.Conv2d(8, 4, 3, padding=1),
        ),
        IMAGE,
    ),
    "pooled": (lambda: nn.Sequential(nn.Conv2d(4, 8, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(200, 4)), IMAGE),
    "mixer": (lambda: Calls(lambda x, a, b: b(a(x.mT).mT), linear(10, 20, 10), linear(16, 32, 16)), TOKENS),
    "attention": (lambda: Calls(attend, nn.Linear(16, 48)), TOKENS),
    "causal attention": (lambda: Calls(lambda x, a: attend(x, a, causal=True), nn.Linear(16, 48)), TOKENS),
    "grouped heads": (lambda: Calls(lambda x, a: attend(x, a, heads=4, groups=2), nn.Linear(16, 32)), TOKENS),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), TOKENS),
}


# of the gradient of grouped weights, those that PyTorch counts too much: 2 for each weight of an output, or input
# (transposed), and each further group
TOO_MANY = {
    "grouped": 2 * (2 * 8 * 10 * 10) * (2 * 9) * (2 - 1),
    "depthwise": 2 * (2 * 4 * 10 * 10) * (1 * 9) * (4 - 1),
    "transposed, grouped": 2 * (2 * 4 * 12 * 12) * (4 * 9) * (2 - 1),
}


def products(captured: Capture) -> tuple[int, int]:
    """FLOPs of products but for their biases, and those of the backward passes of attention."""
    total, attention, program = 0, 0, captured.program

    def size(value: int) -> int:
        return math.prod(program.layouts[value].size)

    for calls, flops in zip(program.calls, captured.graph.flops.tolist(), strict=True):
        if not calls:
            continue
        call, name = calls[0], calls[0].func._schema.name.removeprefix("aten::")
        if name == "_scaled_dot_product_flash_attention_for_cpu_backward":
            attention += flops
        elif name in PRODUCTS or "attention" in name:
            total += flops
            if name.startswith("add") or name == "baddbmm" or (name == "convolution" and call.args[2] is not None):
                total -= size(call.outputs[0])
            if name == "convolution_backward" and call.args[10][2]:
                total -= size(call.args[0].value)
    return total, attention


def test_there_are_forty() -> None:
    """The table has at least forty models."""
    assert len(MODELS) >= 40


@pytest.mark.parametrize("name", MODELS)
def test_flops_are_those_of_a_run(name: str) -> None:
    """A training step has the FLOPs that PyTorch counts, exactly."""
    build, shape = MODELS[name]
    torch.manual_seed(0)
    model, x = build(), torch.randn(shape)
    found, backward = products(capture(model, (x,)))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(x).mean().backward()
    if backward:
        heads = 4 if name == "grouped heads" else 2
        width, pairs = 16 // heads, 2 * heads * 10 * 10
        assert backward == pairs * (10 * width + 9)
        found += pairs * 8 * width - pairs * 5
    assert found == counter.get_total_flops() - TOO_MANY.get(name, 0)
