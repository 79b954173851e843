"""Formulas of `flops.py` for linear algebra: decompositions, solutions, distances, and nn.Bilinear."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from gdp.models import textbook_flops as textbook
from gdp.models.names import by_name

Formula = Callable[[Sequence[Any], Mapping[str, Any], list[Tensor]], int]


def _of_matrices(count: Callable[..., int], position: int = 0) -> Formula:
    """Returns the formula that counts each matrix of an argument by its rows, its columns and the whole call."""

    def formula(args: Sequence[Any], kwargs: Mapping[str, Any], outputs: list[Tensor]) -> int:
        matrices: Tensor = args[position]
        m, n = (int(size) for size in matrices.shape[-2:])
        return math.prod(matrices.shape[:-2]) * int(count(m, n, args))

    return formula


def _argument(args: Sequence[Any], position: int, default: Any) -> Any:
    return args[position] if len(args) > position else default


def _pairs(count: int, pairs: int, points: int) -> Formula:
    """Counts per pair of points, an argument or -1 for the result, and per coordinate of the argument `points`."""

    def formula(args: Sequence[Any], kwargs: Mapping[str, Any], outputs: list[Tensor]) -> int:
        num_pairs = (outputs[0] if pairs < 0 else args[pairs]).numel()
        return count * int(num_pairs) * int(args[points].shape[-1])

    return formula


def _euclidean_distance(args: Sequence[Any], kwargs: Mapping[str, Any], outputs: list[Tensor]) -> int:
    """Points, points: squares of both, a product of all pairs, two sums and a root."""
    first, second = args[0], args[1]
    width = int(first.shape[-1])
    return 2 * int(first.numel() + second.numel()) + (2 * width + 3) * int(outputs[0].numel())


def _least_squares(args: Sequence[Any], kwargs: Mapping[str, Any], outputs: list[Tensor]) -> int:
    """A, b: R, then the reflections of each right-hand side and a triangular solution (Golub and Van Loan, 5.3)."""
    (m, n), matrices = sorted(args[0].shape[-2:])[::-1], math.prod(args[0].shape[:-2])
    each = 2 * n * (2 * m - n) + n * n
    return int(matrices * textbook.qr(m, n, has_q=False) + args[1].numel() // args[0].shape[-2] * each)


def _trilinear(args: Sequence[Any], kwargs: Mapping[str, Any], outputs: list[Tensor]) -> int:
    """Three tensors, the dimensions that each lacks, the dimensions added up: two products, as PyTorch computes it. The
    first adds up the dimensions that the third tensor lacks."""
    tensors, expanded = args[:3], [set(dims) for dims in args[3:6]]
    num_dims = tensors[0].dim() + len(expanded[0])
    sizes = [1] * num_dims
    for tensor, missing in zip(tensors, expanded, strict=True):
        present = [dim for dim in range(num_dims) if dim not in missing]
        for dim, size in zip(present, tensor.shape, strict=True):
            sizes[dim] = max(sizes[dim], int(size))
    first = [sizes[dim] for dim in range(num_dims) if dim not in expanded[0] & expanded[1]]
    done = expanded[2] & set(args[6])
    return 2 * math.prod(first) + 2 * math.prod(size for dim, size in enumerate(sizes) if dim not in done)


FORMULAS: dict[str, Formula] = by_name(
    {
        "_trilinear": _trilinear,
        "linalg_lstsq": _least_squares,
        "_euclidean_dist": _euclidean_distance,
        # of each pair and coordinate: subtract, absolute value or power, sum; backward: the like times g, sum
        "_cdist_forward _pdist_forward": _pairs(3, -1, 0),
        "_cdist_backward": _pairs(4, 4, 1),
        "_pdist_backward": _pairs(4, 3, 1),
        "linalg_cholesky_ex cholesky": _of_matrices(lambda m, n, args: textbook.cholesky(n)),
        # of a factor: two triangular solutions for each right-hand side; the inverse as LAPACK's potri
        "cholesky_solve": lambda args, kwargs, outputs: 2 * int(outputs[0].numel() * args[1].shape[-1]),
        "cholesky_inverse": _of_matrices(lambda m, n, args: 2 * n**3 // 3),
        "linalg_lu linalg_lu_factor_ex _linalg_det _linalg_slogdet": _of_matrices(lambda m, n, args: textbook.lu(m, n)),
        "_linalg_solve_ex": lambda args, kwargs, outputs: (
            _of_matrices(lambda m, n, args: textbook.lu(m, n))(args, kwargs, outputs)
            + 2 * int(args[1].numel() * args[0].shape[-1])
        ),
        "linalg_lu_solve": lambda args, kwargs, outputs: 2 * int(args[2].numel() * args[0].shape[-1]),
        "linalg_inv_ex": _of_matrices(lambda m, n, args: 2 * n**3),
        "triangular_solve": lambda args, kwargs, outputs: int(args[0].numel() * args[1].shape[-1]),
        "linalg_qr": _of_matrices(
            lambda m, n, args: textbook.qr(
                m, n, has_q=_argument(args, 1, "reduced") != "r", is_complete=_argument(args, 1, "") == "complete"
            )
        ),
        "geqrf": _of_matrices(lambda m, n, args: textbook.qr(m, n, has_q=False)),
        "linalg_householder_product": _of_matrices(
            lambda m, n, args: textbook.householder_product(m, n, int(args[1].shape[-1]))
        ),
        "_linalg_eigh": _of_matrices(lambda m, n, args: textbook.eigh(n, has_vectors=bool(_argument(args, 2, True)))),
        "linalg_eig": _of_matrices(lambda m, n, args: textbook.eig(n)),
        "_linalg_eigvals": _of_matrices(lambda m, n, args: textbook.eig(n, has_vectors=False)),
        "_linalg_svd": _of_matrices(
            lambda m, n, args: textbook.svd(
                m, n, has_vectors=bool(_argument(args, 2, True)), is_complete=bool(_argument(args, 1, False))
            )
        ),
        # singular values and vectors, and a product
        "linalg_pinv": _of_matrices(lambda m, n, args: textbook.svd(m, n) + 2 * m * n * min(m, n)),
        "linalg_matrix_exp": _of_matrices(lambda m, n, args: textbook.exponential(n)),
    }
)
