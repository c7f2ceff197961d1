"""Linear algebra on the host, for the backends whose own is slower on a CPU."""

import numpy as np
from scipy.linalg import lapack


def lapack_inverse(matrix):
    """Invert a symmetric positive definite matrix by LAPACK's potrf and potri.

    Args:
        matrix: Array of shape `(d, d)`, float32 or float64, or a stack of them.

    Returns:
        Its inverse as a NumPy array, or NaN throughout where it is not positive
        definite.
    """
    matrix = np.asarray(matrix)
    if matrix.ndim == 3:
        return np.stack([lapack_inverse(m) for m in matrix])
    prefix = "s" if matrix.dtype == np.float32 else "d"
    potrf, potri = getattr(lapack, prefix + "potrf"), getattr(lapack, prefix + "potri")
    # Row-major memory read column by column is the transpose, which here is the same
    # matrix: no copy is made to change the order.
    inverse, failed = potrf(matrix.T, lower=1)
    if not failed:
        inverse, failed = potri(inverse, lower=1, overwrite_c=1)
    if failed:
        return np.full(matrix.shape, np.nan, matrix.dtype)
    upper = inverse.T  # the same memory, row-major: its upper triangle is filled
    return np.triu(upper) + np.triu(upper, 1).T


def lapack_inverses(matrices) -> list:
    """`lapack_inverse` of each of several matrices."""
    return [lapack_inverse(m) for m in matrices]


def lapack_pencil(A, C):
    """`(s, K)` with `K^T A K = I` and `K^T C K = diag(s)`, by LAPACK's sygvd.

    Args:
        A: Symmetric positive definite array of shape `(d, d)`, float32 or float64.
        C: Symmetric array of the same shape.

    Returns:
        Eigenvalues in ascending order, and `K`; NaN throughout where `A` is not
        positive definite or something is not finite.
    """
    A, C = np.asarray(A), np.asarray(C)
    prefix = "s" if A.dtype == np.float32 else "d"
    failed = not (np.isfinite(A).all() and np.isfinite(C).all())
    if not failed:
        # Transposed, as above: LAPACK reads column by column.
        s, K, failed = getattr(lapack, prefix + "sygvd")(C.T, A.T)
    if failed:
        return np.full(A.shape[:1], np.nan, A.dtype), np.full_like(A, np.nan)
    return s, np.ascontiguousarray(K)


def lapack_pencils(*matrices) -> list:
    """`lapack_pencil` of each of several `A, C, A, C, ...`, as `[s, K, s, K, ...]`."""
    pairs = zip(matrices[::2], matrices[1::2], strict=True)
    return [part for A, C in pairs for part in lapack_pencil(A, C)]
