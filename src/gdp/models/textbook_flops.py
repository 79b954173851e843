"""FLOPs of decompositions of matrices, from their sizes, and of interpolation. Those of matrices are in G. Golub, C.
Van Loan, "Matrix Computations", 4th edition, 2013, in the sections named: for a matrix of m rows and n columns with m
>= n; a wide matrix is its transpose."""


def lu(m: int, n: int) -> int:
    """Section 3.2: 2 n^3 / 3 of a square matrix."""
    m, n = max(m, n), min(m, n)
    return n * n * (3 * m - n) // 3


def cholesky(n: int) -> int:
    """Section 4.2."""
    return n**3 // 3


def qr(m: int, n: int, *, has_q: bool = True, is_complete: bool = False) -> int:
    """Section 5.2: R by Householder's reflections, and Q, which has n columns or, if complete, m."""
    small = min(m, n)
    factor = 2 * small * small * (3 * max(m, n) - small) // 3
    if not has_q:
        return factor
    columns = m if is_complete else small
    return factor + householder_product(m, columns, small)


def householder_product(m: int, n: int, k: int) -> int:
    """Section 5.1: n columns of the product of k reflections, backward; as LAPACK's orgqr."""
    return 4 * m * n * k - 2 * (m + n) * k * k + 4 * k**3 // 3


def eigh(n: int, *, has_vectors: bool = True) -> int:
    """Section 8.3: symmetric QR."""
    return 9 * n**3 if has_vectors else 4 * n**3 // 3


def eig(n: int, *, has_vectors: bool = True) -> int:
    """Section 7.5: QR of a matrix that is not symmetric."""
    return 25 * n**3 if has_vectors else 10 * n**3


def svd(m: int, n: int, *, has_vectors: bool = True, is_complete: bool = False) -> int:
    """Section 8.6: the algorithm of Golub and Reinsch."""
    m, n = max(m, n), min(m, n)
    if not has_vectors:
        return 4 * m * n * n - 4 * n**3 // 3
    return 4 * m * m * n + 8 * m * n * n + 9 * n**3 if is_complete else 14 * m * n * n + 8 * n**3


def exponential(n: int) -> int:
    """Five products: the Taylor polynomial of degree 18 of P. Bader, S. Blanes, F. Casas, Mathematics 7(12), 2019. How
    often it is squared depends on the norm; no squaring is counted."""
    return 10 * n**3


def interpolation(num_elements: int, num_dims: int, mode: str) -> int:
    """Returns a product for each neighbour and their sum: 2, or 4 if cubic, in a dimension; the nearest is moved."""
    corners: int = {"nearest": 1, "cubic": 4, "bicubic": 4}.get(mode, 2) ** num_dims
    return num_elements * (2 * corners - 1 if corners > 1 else 0)
