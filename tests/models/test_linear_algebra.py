"""FLOPs of decompositions, distances and interpolation are those of the textbook, in PyTorch and in JAX."""

from collections.abc import Callable
from typing import Any

import jax
import pytest
import torch
from jax import numpy as jnp
from torch import Tensor, nn
from torch.nn import functional

from gdp.models.jax import capture_jax
from gdp.models.pytorch import capture


class Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs)


L = torch.linalg
# matrices [16, 16], n^3 = 4096, unless the shape says otherwise; m n^2 = 8192 for [32, 16]
CASES: dict[str, tuple[Callable[..., Any], tuple[int, ...], int]] = {
    "linalg_cholesky_ex": (L.cholesky, (3, 16, 16), 3 * (4096 // 3)),
    "linalg_lu_factor_ex": (L.lu_factor, (16, 16), 2 * 4096 // 3),
    "_linalg_det": (L.det, (16, 16), 2 * 4096 // 3),
    "_linalg_solve_ex": (lambda a: L.solve(a, a[:, :3]), (16, 16), 2 * 4096 // 3 + 2 * 3 * 16**2),
    "linalg_inv_ex": (L.inv, (16, 16), 2 * 4096),
    "linalg_qr": (L.qr, (32, 16), 2 * (2 * (8192 - 4096 / 3))),  # R, and as much for 16 columns of Q
    "linalg_qr r": (lambda a: L.qr(a, mode="r")[1], (32, 16), 2 * (8192 - 4096 / 3)),
    # R, and 4 (m^2 n - m n^2 + n^3 / 3) for 32 columns
    "linalg_qr complete": (
        lambda a: L.qr(a, mode="complete"),
        (32, 16),
        2 * (8192 - 4096 / 3) + 4 * (32**2 * 16 - 8192 + 4096 / 3),
    ),
    "_linalg_eigh": (L.eigh, (2, 16, 16), 2 * 9 * 4096),
    "linalg_eig": (L.eig, (16, 16), 25 * 4096),
    "_linalg_svd": (lambda a: L.svd(a, full_matrices=False), (32, 16), 14 * 8192 + 8 * 4096),
    "_linalg_svd wide": (lambda a: L.svd(a, full_matrices=False), (16, 32), 14 * 8192 + 8 * 4096),
    "linalg_matrix_exp": (torch.matrix_exp, (3, 16, 16), 3 * 5 * 2 * 4096),
    "linalg_householder_product": (lambda a: L.householder_product(a, a[0]), (32, 16), 2 * (8192 - 4096 / 3)),
    # R, 3 right-hand sides by 16 reflections, and their triangular solutions
    "linalg_lstsq": (
        lambda a: L.lstsq(a, a[:, :3]).solution,
        (32, 16),
        2 * (8192 - 4096 / 3) + 3 * (2 * 16 * (64 - 16) + 16**2),
    ),
    "linalg_lstsq wide": (
        lambda a: L.lstsq(a, a[:, :, 0]).solution,
        (3, 16, 32),
        3 * (2 * (8192 - 4096 / 3) + 2 * 16 * (64 - 16) + 16**2),
    ),
    "cholesky_solve": (lambda a: torch.cholesky_solve(a[:, :3], a), (16, 16), 2 * 3 * 16**2),
    # 64 x 10 pairs of 32: subtract, absolute value, sum; by a product of 2 x 32 and three more, with both squares
    "_cdist_forward": (lambda a: torch.cdist(a, a[:10], p=1.0), (64, 32), 3 * 640 * 32),
    "_euclidean_dist": (lambda a: torch.cdist(a, a[:10]), (64, 32), 640 * (64 + 3) + 2 * 74 * 32),
    "_pdist_forward": (torch.pdist, (64, 32), 3 * (64 * 63 // 2) * 32),
    # 8 corners of 2 x 64 elements: 8 products and 7 sums; 16 of a cubic one
    "grid_sampler_3d": (
        lambda a: functional.grid_sample(a, torch.zeros(1, 4, 4, 4, 3), align_corners=False),
        (1, 2, 4, 4, 4),
        128 * 15,
    ),
    "grid_sampler_2d": (
        lambda a: functional.grid_sample(a, torch.zeros(1, 4, 4, 2), align_corners=False),
        (1, 2, 4, 4),
        32 * 7,
    ),
    "grid_sampler_2d cubic": (
        lambda a: functional.grid_sample(a, torch.zeros(1, 4, 4, 2), mode="bicubic", align_corners=False),
        (1, 2, 4, 4),
        32 * 31,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_flops_of_matrices(case: str) -> None:
    """FLOPs are those of Golub and Van Loan, rounded down."""
    function, shape, flops = CASES[case]
    captured = capture(Function(function), (torch.zeros(shape),), training=False)
    graph = captured.graph
    (op,) = [op for op, kind in enumerate(graph.kinds) if kind == f"aten.{case.split()[0]}"]
    assert abs(int(graph.flops[op]) - flops) <= 2
    assert not captured.coverage.unknown


def test_flops_of_bilinear_layers() -> None:
    """x W y, batch 4, [8] x [10, 8, 6] x [6]: 2 x 4 x 10 x 6 x 8 for x W, then 2 x 4 x 10 x 6; gradients alike."""
    captured = capture(nn.Bilinear(8, 6, 10), (torch.zeros(4, 8), torch.zeros(4, 6)))
    graph = captured.graph
    forward, backward = [int(graph.flops[op]) for op, kind in enumerate(graph.kinds) if kind == "aten._trilinear"]
    assert forward == 2 * 4 * 10 * 6 * 8 + 2 * 4 * 10 * 6
    assert backward == pytest.approx(2 * 4 * 10 * 6 * 8, rel=0.2)
    assert not captured.coverage.unknown


@pytest.mark.parametrize(
    ("kind", "function", "flops"),
    [
        ("eigh", jnp.linalg.eigh, 9 * 4096),
        ("svd", lambda a: jnp.linalg.svd(a, full_matrices=False), 22 * 4096),
        ("cholesky", jax.lax.linalg.cholesky, 4096 // 3),
        ("qr", jnp.linalg.qr, 8 * 4096 // 3),
        ("lu", jax.lax.linalg.lu, 2 * 4096 // 3),
    ],
)
def test_flops_of_jax(kind: str, function: Callable[..., Any], flops: int) -> None:
    """JAX's decompositions of [16, 16] cost the same."""
    graph = capture_jax(function, jax.ShapeDtypeStruct((16, 16), "float32")).graph
    found = {name: int(count) for name, count in zip(graph.kinds, graph.flops, strict=True)}
    assert found[kind] == pytest.approx(flops, abs=2)
