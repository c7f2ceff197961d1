"""Linear algebra on the host, for the backends whose own is slower on a CPU."""

import contextlib

import numpy as np
from scipy.linalg import lapack
from threadpoolctl import ThreadpoolController

# Up to this width one thread is used: those of BLAS wait for one another, and for the
# cores that the backend's own threads have.
ONE_THREAD = 1024

_blas = ThreadpoolController().select(user_api="blas")


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
    with _threads(len(matrix)):
        inverse, failed = potrf(matrix.T, lower=1)
        if not failed:
            inverse, failed = potri(inverse, lower=1, overwrite_c=1)
    if failed:
        return np.full(matrix.shape, np.nan, matrix.dtype)
    return _mirrored(inverse.T)  # the same memory, row-major: its upper triangle


def _threads(width):
    return _blas.limit(limits=1) if width <= ONE_THREAD else contextlib.nullcontext()


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


def lapack_eigh(matrix) -> tuple:
    """The eigenvalues and eigenvectors of a symmetric matrix by LAPACK's syevd.

    syevr is not slower at some sizes, but its vectors are orthogonal to 1e-4 only
    where eigenvalues cluster, as those of a singular factor do at zero.

    Args:
        matrix: Array of shape `(d, d)`, float32 or float64, or a stack of them.

    Returns:
        `(values, vectors)` as NumPy arrays, NaN throughout where LAPACK fails.
    """
    matrix = np.asarray(matrix)
    if matrix.ndim == 3:
        values, vectors = zip(*(lapack_eigh(m) for m in matrix), strict=True)
        return np.stack(values), np.stack(vectors)
    syevd = lapack.ssyevd if matrix.dtype == np.float32 else lapack.dsyevd
    failed = not np.isfinite(matrix).all()
    if not failed:
        values, vectors, failed = syevd(matrix.T, lower=0)
    if failed:
        nan = np.full(matrix.shape, np.nan, matrix.dtype)
        return nan[0], nan
    return values, np.ascontiguousarray(vectors)


def lapack_eighs(matrices) -> list:
    """`lapack_eigh` of each of several matrices, in one flat list."""
    return [array for m in matrices for array in lapack_eigh(m)]
