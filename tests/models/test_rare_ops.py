"""Ops that few models have are priced by rules, not at one FLOP for each element of their result."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
import torch
from jax import numpy as jnp
from torch import Tensor, nn
from torch.nn import functional

from gdp.cluster import Cluster
from gdp.costs.op_times import op_times, unused_names
from gdp.models.jax import capture_jax
from gdp.models.pytorch import Capture, capture, capture_fn
from gdp.parallel.layout import Layout
from gdp.parallel.step import Step

HALF = torch.float16


class Function(nn.Module):
    """A function of the inputs and a parameter of one number."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.ones(1))

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*(x * self.weight if self.training and x.is_floating_point() else x for x in inputs))


def flops_of(captured: Capture) -> dict[str, int]:
    return {
        kind.removeprefix("aten."): int(flops)
        for kind, flops in zip(captured.graph.kinds, captured.graph.flops, strict=True)
    }


def sparse_linear(x: Tensor, weight: Tensor, kinds: Tensor) -> Any:
    return torch.ops.aten._sparse_semi_structured_linear(x, weight, kinds)


INFERENCE: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], int]] = {
    # 50 searches in 100 places: 7 comparisons each
    "bucketize": (lambda x: torch.bucketize(x, torch.arange(100.0)), (torch.ones(50),), 50 * 7),
    "searchsorted": (lambda x: torch.searchsorted(torch.arange(100.0), x), (torch.ones(50),), 50 * 7),
    # 50 searches among a table of 2 x 4 numbers, or for a single one: 3 comparisons, and 1
    "isin": (lambda x: torch.isin(x, torch.ones(2, 4)), (torch.ones(50),), 50 * 3),
    "isin a number": (lambda x: torch.isin(x, 3.0), (torch.ones(50),), 50),
    "isin a tensor of one": (lambda x: torch.isin(x, torch.tensor(3.0)), (torch.ones(50),), 50),
    "isin of a number": (lambda x: torch.isin(3.0, x), (torch.ones(8),), 3),
    "hardswish": (functional.hardswish, (torch.ones(4, 8),), 32),
    "median": (lambda x: x.median(-1), (torch.ones(4, 8),), 32),
    "kthvalue": (lambda x: x.kthvalue(3), (torch.ones(4, 8),), 32),
    "logcumsumexp": (lambda x: x.logcumsumexp(-1), (torch.ones(4, 8),), 4 * 32),
    "renorm": (lambda x: x.renorm(2, 0, 1.0), (torch.ones(4, 8),), 3 * 32),
    # 4 x 4 of 16 x 16 pixels: four times smaller, two neighbours become eight in each dimension
    "_upsample_bilinear2d_aa": (
        lambda x: functional.interpolate(x, (4, 4), mode="bilinear", antialias=True),
        (torch.ones(1, 2, 16, 16),),
        2 * (2 * 4 * 4) * 8 * 8,
    ),
    # larger: four neighbours in each dimension
    "_upsample_bicubic2d_aa": (
        lambda x: functional.interpolate(x, (32, 32), mode="bicubic", antialias=True),
        (torch.ones(1, 2, 16, 16),),
        2 * (2 * 32 * 32) * 4 * 4,
    ),
    "col2im": (lambda x: functional.fold(x, (8, 8), 2, stride=2), (torch.ones(1, 12, 16),), 192),
    "affine_grid_generator": (
        lambda x: functional.affine_grid(x, [2, 1, 4, 4], align_corners=False),
        (torch.ones(2, 2, 3),),
        2 * 3 * (2 * 4 * 4 * 2),
    ),
    # 64 rows with a weight [32, 64], of which half is stored
    "_sparse_semi_structured_linear": (
        sparse_linear,
        (torch.ones(64, 64, dtype=HALF), torch.ones(32, 32, dtype=HALF), torch.ones(32, 4, dtype=torch.int16)),
        2 * 64 * 32 * 32,
    ),
    # [64, 64], of which half is stored with its places in 64 x 36, times [64, 16]
    "_cslt_sparse_mm": (
        lambda a, b: torch._cslt_sparse_mm(a, b),
        (torch.ones(64, 36, dtype=HALF), torch.ones(64, 16, dtype=HALF)),
        2 * 64 * 32 * 16,
    ),
    # a complex product is four products and two sums, a sum two more
    "mm": (
        torch.mm,
        (torch.ones(8, 16, dtype=torch.complex64), torch.ones(16, 4, dtype=torch.complex64)),
        8 * 8 * 16 * 4,
    ),
}


@pytest.mark.parametrize("kind", INFERENCE)
def test_flops(kind: str) -> None:
    """FLOPs are those of hand arithmetic."""
    function, inputs, flops = INFERENCE[kind]
    captured = capture(Function(function).eval(), inputs, training=False)
    assert flops_of(captured)[kind.partition(" ")[0]] == flops
    assert not captured.coverage.unknown


@pytest.mark.parametrize(
    ("function", "kind", "flops"),
    [
        # as many sums as the gradient has elements
        (lambda x: functional.pad(x, (1, 1, 1, 1), mode="reflect"), "reflection_pad2d_backward", 2 * 10 * 10),
        (lambda x: functional.pad(x, (1, 1, 1, 1), mode="replicate"), "replication_pad2d_backward", 2 * 10 * 10),
        (lambda x: functional.interpolate(x, 16, mode="nearest-exact"), "_upsample_nearest_exact2d_backward", 512),
        (
            lambda x: functional.interpolate(x, (4, 4), mode="bilinear", antialias=True),
            "_upsample_bilinear2d_aa_backward",
            2 * (2 * 4 * 4) * 4 * 4,
        ),
    ],
)
def test_flops_of_gradients(function: Callable[..., Any], kind: str, flops: int) -> None:
    """Gradients of images [1, 2, 8, 8] are priced, too."""
    captured = capture(Function(function), (torch.ones(1, 2, 8, 8),))
    assert flops_of(captured)[kind] == flops
    assert not captured.coverage.unknown


@pytest.mark.parametrize(
    ("targets", "lengths", "reduction"),
    [
        (torch.ones(2, 4).long(), (torch.tensor([10, 9]), torch.tensor([4, 3])), "mean"),
        (torch.ones(8).long(), (torch.tensor([10, 9]), torch.tensor([4, 4])), "none"),
        (torch.ones(2, 4).long(), ((10, 9), (4, 3)), "sum"),
    ],
)
def test_connectionist_losses(targets: Tensor, lengths: tuple[Any, Any], reduction: str) -> None:
    """10 times, 2 sequences, 2 x 4 + 1 states, 8 classes: 13 FLOPs a state; backward 16, and 3 a class."""

    def function(x: Tensor) -> Tensor:
        return functional.ctc_loss(x.log_softmax(-1), targets, *lengths, reduction=reduction)

    model, x = Function(function), torch.randn(10, 2, 8)
    captured = capture(model, (x,))
    found = flops_of(captured)
    assert (found["_ctc_loss"], found["_ctc_loss_backward"]) == (13 * 180, 16 * 180 + 3 * 160)
    assert not captured.coverage.unknown
    assert captured.program.replay(model, (x,)).loss == model(x).mean()


@pytest.mark.parametrize(("dtype", "rate"), [(torch.complex64, "float32"), (torch.complex128, "float64")])
def test_complex_products_run_at_the_rate_of_their_parts(dtype: torch.dtype, rate: str) -> None:
    """Products of complex numbers have the type of their parts, in PyTorch; batches and sums alike."""
    x = torch.ones(2, 4, 4, dtype=dtype)
    captured = capture(Function(lambda a: torch.baddbmm(a, a, a)).eval(), (x,), training=False)
    (op,) = [op for op, kind in enumerate(captured.graph.kinds) if kind == "aten.baddbmm"]
    assert captured.graph.dtypes[op] == rate
    assert captured.graph.flops[op] == 8 * 2 * 4**3 + 2 * 4**2


def types_of(captured: Capture) -> dict[str, str]:
    graph = captured.graph
    return {kind.removeprefix("aten."): dtype for kind, dtype in zip(graph.kinds, graph.dtypes, strict=True)}


def test_convolutions_and_recurrent_layers_round_float32() -> None:
    """cuDNN computes them in TF32 by default; what is summed over replicas stays float32, and a P100 has no TF32."""
    image = (torch.randn(8, 64, 32, 32).to(memory_format=torch.channels_last),)  # or it would be transposed for TF32
    captured = capture(nn.Sequential(nn.Conv2d(64, 64, 3), nn.BatchNorm2d(64)), image)
    types = types_of(captured)
    assert types["convolution"] == types["convolution_backward"] == "tf32"
    assert types["native_batch_norm"] == "float32"
    lstm = capture(Function(lambda x: nn.LSTM(8, 8)(x)[0]), (torch.randn(4, 2, 8),))
    assert types_of(lstm)["mkldnn_rnn_layer"] == "tf32"
    halves = capture(nn.Conv2d(4, 4, 3).bfloat16(), (torch.randn(2, 4, 8, 8, dtype=torch.bfloat16),))
    assert types_of(halves)["convolution"] == "bfloat16"
    replicas = Step.of(captured.graph, Layout.parse("data=2")).graph
    sums = [dtype for kind, dtype in zip(replicas.kinds, replicas.dtypes, strict=True) if "all_reduce" in kind]
    assert set(sums) == {"float32"}
    (op,) = np.flatnonzero(np.array(captured.graph.kinds) == "aten.convolution")
    plain = replace(captured.graph, dtypes=tuple("float32" for _ in captured.graph.dtypes))
    for kind, ratio in (("a100-sxm-80g", 2), ("p100-pcie-16g", 1)):
        times_ns = [op_times(graph, Cluster.parse(kind))[op, 0] for graph in (captured.graph, plain)]
        assert ratio * times_ns[0] <= times_ns[1] <= 8 * ratio * times_ns[0]
        assert unused_names(captured.graph, Cluster.parse(kind)) == []


@pytest.mark.parametrize(("setting", "dtype"), [("highest", "float32"), ("high", "tf32")])
def test_products_round_float32_where_the_model_says_so(setting: str, dtype: str) -> None:
    """`torch.set_float32_matmul_precision` is heeded for products, not for attention and float64."""
    x = torch.randn(2, 4, 16, 8)

    def function(x: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(x, x, x) @ x.mT

    torch.set_float32_matmul_precision(setting)
    try:
        types = types_of(capture(Function(function), (x,)))
        doubles = types_of(capture(Function(lambda x: x @ x.mT), (x.double(),)))
    finally:
        torch.set_float32_matmul_precision("highest")
    fused = {found for kind, found in types.items() if "attention" in kind}
    assert (types["bmm"], fused) == (dtype, {"float32"})
    assert types["mul"] == "float32"
    assert doubles["bmm"] == "float64"


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [(None, "tf32"), ("high", "tf32"), ("highest", "float32"), ("F32_F32_F32", "float32"), ("TF32_TF32_F32", "tf32")],
)
def test_products_of_jax_round_float32(precision: str | None, dtype: str) -> None:
    """JAX lets cards round unless the precision is the highest; float16 is not concerned."""
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    graph = capture_jax(lambda a: jax.lax.dot(a, a, precision=precision) + 1, x).graph
    assert dict(zip(graph.kinds, graph.dtypes, strict=True)) == {
        "input": "float32",
        "dot_general": dtype,
        "add": "float32",
    }
    half = capture_jax(lambda a: jnp.dot(a, a), jax.ShapeDtypeStruct((8, 8), jnp.float16)).graph
    assert half.dtypes[-1] == "float16"


def test_products_of_jax() -> None:
    """JAX's products of complex numbers and of int8 cost the same."""
    captured = capture_jax(jnp.dot, jax.ShapeDtypeStruct((8, 16), jnp.complex64), jnp.ones((16, 4), jnp.complex64))
    assert captured.graph.flops.sum() == 8 * 8 * 16 * 4
    small = jnp.ones((8, 8), jnp.int8)
    graph = capture_jax(lambda a: jax.lax.dot(a, a, preferred_element_type=jnp.int32), small).graph
    assert graph.flops.sum() == 2 * 8**3
    assert "int8" in {graph.dtypes[op] for op, flops in enumerate(graph.flops) if flops}


def test_truncated_normals_are_drawn_without_content() -> None:
    """Models that draw their parameters from a truncated normal distribution are built under fake tensors."""

    def build() -> tuple[nn.Module, tuple[Tensor]]:
        model = nn.Linear(8, 8)
        nn.init.trunc_normal_(model.weight, std=0.02)
        nn.init.trunc_normal_(model.bias, a=5.0, b=6.0)
        return model, (torch.ones(4, 8),)

    assert capture_fn(build, training=False).graph.flops.sum() == 2 * 4 * 8 * 8 + 4 * 8


F32 = 4  # bytes
BYTES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], str, int]] = {
    # in, weight, bias, out
    "linear": (nn.Linear(16, 32), (torch.ones(8, 16),), "addmm", F32 * (8 * 16 + 16 * 32 + 32 + 8 * 32)),
    # image, filters, out of 10 x 10
    "convolution": (
        nn.Conv2d(4, 8, 3, bias=False),
        (torch.ones(2, 4, 12, 12),),
        "convolution",
        F32 * (2 * 4 * 144 + 8 * 4 * 9 + 2 * 8 * 100),
    ),
    # in, scale, shift, out, mean and deviation of each row
    "layer norm": (nn.LayerNorm(16), (torch.ones(8, 16),), "native_layer_norm", F32 * (2 * 128 + 2 * 16 + 2 * 8)),
    # in, out; scale, shift; means and deviations of the batch; both running ones are read and written
    "batch norm": (
        nn.BatchNorm2d(4),
        (torch.ones(2, 4, 3, 3),),
        "native_batch_norm",
        F32 * (2 * 72 + 2 * 4 + 2 * 4 + 4 * 4),
    ),
    "softmax": (nn.Softmax(-1), (torch.ones(8, 16),), "_softmax", F32 * 2 * 128),
    # a row that is repeated is read once
    "broadcast sum": (lambda x: x + x[:1].expand(8, 16), (torch.ones(8, 16),), "add", F32 * (128 + 16 + 128)),
    "cat": (lambda x: torch.cat([x, x[:, :8]], 1), (torch.ones(8, 16),), "cat", F32 * 2 * (128 + 64)),
    # rows of the table for 5 ids of 8 bytes, and as much written
    "embedding": (nn.Embedding(1000, 8), (torch.zeros(5, dtype=torch.long),), "embedding", 5 * 8 + 2 * 5 * 8 * F32),
    # three of [2, 2, 10, 8] in, one out, and a sum for each row
    "attention": (
        lambda x: functional.scaled_dot_product_attention(x, x * 2, x * 3),
        (torch.ones(2, 2, 10, 8),),
        "_scaled_dot_product_flash_attention_for_cpu",
        F32 * (4 * 320 + 40),
    ),
    # maxima of 2 x 2, and their places of 8 bytes
    "max pool": (nn.MaxPool2d(2), (torch.ones(1, 2, 8, 8),), "max_pool2d_with_indices", F32 * 128 + 12 * 32),
    # half in, single out
    "cast": (lambda x: x.float(), (torch.ones(8, 16, dtype=HALF),), "_to_copy", 128 * 2 + 128 * 4),
}


@pytest.mark.parametrize("case", BYTES)
def test_bytes(case: str) -> None:
    """Bytes accessed are those of hand arithmetic, in training as in inference."""
    function, inputs, kind, num_bytes = BYTES[case]
    module = function if isinstance(function, nn.Module) else Function(function).eval()
    graph = capture(module, inputs, training=False).graph
    (found,) = [
        int(number) for name, number in zip(graph.kinds, graph.bytes_accessed, strict=True) if name == f"aten.{kind}"
    ]
    assert found == num_bytes


def test_bytes_of_an_update() -> None:
    """Adam reads the weight, its gradient and two moments of 16 x 32 elements, and writes all but the gradient."""
    graph = capture(nn.Linear(16, 32, bias=False), (torch.ones(8, 16),)).graph
    (found,) = [
        int(n) for name, n in zip(graph.kinds, graph.bytes_accessed, strict=True) if name == "aten._fused_adam_"
    ]
    assert found == 7 * F32 * 16 * 32
