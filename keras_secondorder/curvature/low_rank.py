"""A symmetric matrix as one of low rank plus a multiple of the identity."""

import functools
from typing import NamedTuple

import numpy as np
from keras import ops

# How much of a start that is fixed joins the subspace of the last time, so that no
# direction stays out of sight for good.
PROBE = 0.1


class LowRank(NamedTuple):
    """`Q S Q^T + c I`.

    Attributes:
        basis: `Q`, orthonormal columns, shape `(d, r)`.
        core: `S`, symmetric, shape `(r, r)`.
        scale: `c`, a scalar.
    """

    basis: object
    core: object
    scale: object

    def left(self, V):
        """The matrix times `V` of shape `(d, k)`."""
        inside = ops.matmul(self.core, ops.matmul(ops.transpose(self.basis), V))
        return self.scale * V + ops.matmul(self.basis, inside)

    def right(self, V):
        """`V` of shape `(k, d)` times the matrix."""
        inside = ops.matmul(ops.matmul(V, self.basis), self.core)
        return self.scale * V + ops.matmul(inside, ops.transpose(self.basis))

    def to_dense(self):
        """The matrix itself, shape `(d, d)`."""
        return self.left(ops.eye(self.basis.shape[0], dtype=self.basis.dtype))

    @property
    def within(self):
        """`S + c I`: what it is within the span of its basis, shape `(r, r)`."""
        return self.core + self.scale * ops.eye(self.core.shape[0])

    @classmethod
    def split(cls, basis, within, outside):
        """The matrix from what it is within the span of a basis, and outside of it.

        Args:
            basis: Orthonormal columns, shape `(d, r)`.
            within: Symmetric, shape `(r, r)`.
            outside: A scalar.
        """
        core = within - outside * ops.eye(within.shape[0])
        return cls(basis, core, outside)


def low_rank(matrix, start) -> LowRank:
    """The dominant subspace of a matrix, with the mean of all other eigenvalues.

    ```
    Q = orth(M start),   B = Q^T M Q,   c = (tr M - tr B) / (d - r)
    M ~ Q B Q^T + c (I - Q Q^T)
    ```

    One step of orthogonal iteration: from the subspace of a matrix that was nearly the
    same it is all that is needed, and a few from nothing. The trace is exact.

    Args:
        matrix: Symmetric positive semi-definite, shape `(d, d)`.
        start: A basis to start from, shape `(d, r)`; zeros where there is none yet.

    Returns:
        The approximation, positive semi-definite.

    References:
        Puiu (2022), *Randomized K-FACs*, for factors of low rank in K-FAC, without the
        mean of the rest; Tipping & Bishop (1999), *Probabilistic principal component
        analysis*, equation 8, for that mean.
    """
    d, r = start.shape
    start = start + ops.convert_to_tensor(_probe(d, r))
    Y = ops.matmul(matrix, start)
    Q, _ = ops.qr(Y)
    # An input that was always zero has no part in Q; rounding would give it one.
    Q = ops.where(ops.any(Y != 0, axis=1, keepdims=True), Q, 0.0)
    B = ops.matmul(ops.transpose(Q), ops.matmul(matrix, Q))
    rest = ops.maximum(ops.trace(matrix) - ops.trace(B), 0.0) / (d - r)
    return LowRank.split(Q, 0.5 * (B + ops.transpose(B)), rest)


@functools.cache
def _probe(d: int, r: int):
    noise = np.random.default_rng(0).normal(size=(d, r))
    return (noise * (PROBE / d**0.5)).astype("float32")
