"""Linear algebra on the host, for the backends whose own is slower on a CPU."""

import contextlib

import numpy as np
from scipy.linalg import lapack
from threadpoolctl import ThreadpoolController

# Up to this width one thread is used: those of BLAS wait for one another, and for the
# cores that the backend's own threads have.
ONE_THREAD = 1024

_blas = ThreadpoolController().select(user_api="blas")


def lapack_inverses(matrices, dampings, scales) -> list:
    """Invert damped matrices by LAPACK's potrf and potri, each in the one copy of it.

    Args:
        matrices: Symmetric arrays of shape `(d, d)`, float32 or float64, or stacks of
            them, `(k, d, d)`.
        dampings: What is added to each diagonal, a number, or one for each matrix of
            a stack.
        scales: By what each is divided before it is factorised; like `dampings`.

    Returns:
        The inverses of `matrix + damping I` as NumPy arrays, NaN throughout where it is
        not positive definite.
    """
    copies = [np.array(m, order="C") for m in matrices]
    for copy, damping, scale in zip(copies, dampings, scales, strict=True):
        stack = copy.reshape(-1, *copy.shape[-2:])
        each = (np.broadcast_to(v, len(stack)) for v in (damping, scale))
        for matrix, d, s in zip(stack, *each, strict=True):
            _invert(matrix, d, s)
    return copies


def _invert(matrix, damping, scale):
    """`(matrix + damping I)^-1` in place."""
    potrf, potri = lapack.get_lapack_funcs(("potrf", "potri"), (matrix,))
    matrix[np.diag_indices(len(matrix))] += damping
    matrix /= scale
    # Row-major memory read column by column is the transpose, which here is the same
    # matrix: LAPACK works in this memory.
    with _threads(len(matrix)):
        _, failed = potrf(matrix.T, lower=1, overwrite_a=1)
        if not failed:
            _, failed = potri(matrix.T, lower=1, overwrite_c=1)
    if failed:
        matrix.fill(np.nan)
    else:
        _mirrored(matrix)
        matrix /= scale


def lapack_orthonormal(matrices) -> list:
    """Orthonormal columns with the span of a matrix's own, by LAPACK's geqrf and orgqr.

    Args:
        matrices: Arrays of shape `(d, r)` with `d >= r`, float32 or float64.

    Returns:
        Arrays of the same shapes.
    """
    bases = []
    for matrix in map(np.asarray, matrices):
        geqrf, orgqr = lapack.get_lapack_funcs(("geqrf", "orgqr"), (matrix,))
        with _threads(len(matrix)):
            reflectors, tau, _, _ = geqrf(matrix)
            basis, _, _ = orgqr(reflectors, tau, overwrite_a=1)
        bases.append(np.ascontiguousarray(basis))
    return bases


def _threads(width):
    return _blas.limit(limits=1) if width <= ONE_THREAD else contextlib.nullcontext()


def _mirrored(upper, rows=256):
    """Copy the upper triangle to the lower one, in place: a copy is a large matrix."""
    for start in range(0, len(upper), rows):
        end = start + rows
        upper[start:end, :start] = upper[:start, start:end].T
        square = upper[start:end, start:end]
        square[:] = np.triu(square) + np.triu(square, 1).T


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
