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
    return _mirrored(inverse.T)  # the same memory, row-major: its upper triangle


def _mirrored(upper, rows=256):
    """Copy the upper triangle to the lower one, in place: a copy is a large matrix."""
    for start in range(0, len(upper), rows):
        end = start + rows
        upper[start:end, :start] = upper[:start, start:end].T
        square = upper[start:end, start:end]
        square[:] = np.triu(square) + np.triu(square, 1).T
    return upper


def lapack_inverses(matrices) -> list:
    """`lapack_inverse` of each of several matrices."""
    return [lapack_inverse(m) for m in matrices]
