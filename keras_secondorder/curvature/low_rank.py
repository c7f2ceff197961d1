"""A symmetric matrix as one of low rank plus a multiple of the identity."""

import functools
import itertools
from typing import NamedTuple

import numpy as np
from keras import ops

from keras_secondorder.autodiff import orthonormal

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

    def left(self, *rows):
        """The matrix times `V` of shape `(d, k)`, both as lists of blocks of rows."""
        ends = itertools.accumulate((V.shape[0] for V in rows), initial=0)
        bases = [self.basis[a:b] for a, b in itertools.pairwise(ends)]
        parts = list(zip(bases, rows, strict=True))
        within = sum(ops.matmul(ops.transpose(Q), V) for Q, V in parts)
        inside = ops.matmul(self.core, within)
        return [self.scale * V + ops.matmul(Q, inside) for Q, V in parts]

    def right(self, V):
        """`V` of shape `(k, d)` times the matrix."""
        inside = ops.matmul(ops.matmul(V, self.basis), self.core)
        return self.scale * V + ops.matmul(inside, ops.transpose(self.basis))

    def to_dense(self):
        """The matrix itself, shape `(d, d)`."""
        return self.left(ops.eye(self.basis.shape[0], dtype=self.basis.dtype))[0]

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


class Subspace(NamedTuple):
    """A matrix, and where to look for its dominant subspace.

    Attributes:
        matrix: Symmetric positive semi-definite, shape `(d, d)`.
        start: A basis to start from, shape `(d, r)`; zeros where there is none yet.
    """

    matrix: object
    start: object


def low_ranks(sought: list[Subspace], compiled: bool = False) -> list[LowRank]:
    """The dominant subspace of each matrix, with the mean of all other eigenvalues.

    ```
    Q = orth(M start),   B = Q^T M Q,   c = (tr M - tr B) / (d - r)
    M ~ Q B Q^T + c (I - Q Q^T)
    ```

    One step of orthogonal iteration: from the subspace of a matrix that was nearly the
    same it is all that is needed, and a few from nothing. The trace is exact.

    Args:
        sought: The matrices.
        compiled: Whether the step runs inside XLA.

    Returns:
        The approximations, positive semi-definite.

    References:
        Puiu (2022), *Randomized K-FACs*, for factors of low rank in K-FAC, without the
        mean of the rest; Tipping & Bishop (1999), *Probabilistic principal component
        analysis*, equation 8, for that mean.
    """
    probes = [ops.convert_to_tensor(_probe(*start.shape)) for _, start in sought]
    images = [
        ops.matmul(M, start + probe)
        for (M, start), probe in zip(sought, probes, strict=True)
    ]
    bases = orthonormal(images, compiled)
    return [
        _projected(M, Y, Q) for (M, _), Y, Q in zip(sought, images, bases, strict=True)
    ]


def _projected(M, Y, Q) -> LowRank:
    """`M` in the span of `Q`, an orthonormal basis of that of `Y`."""
    d, r = Q.shape
    # An input that was always zero has no part in Q; rounding would give it one.
    Q = ops.where(ops.any(Y != 0, axis=1, keepdims=True), Q, 0.0)
    B = ops.matmul(ops.transpose(Q), ops.matmul(M, Q))
    rest = ops.maximum(traces(M) - traces(B), 0.0) / (d - r)
    return LowRank.split(Q, 0.5 * (B + ops.transpose(B)), rest)


def traces(matrices):
    """The trace of a matrix, or of each of a stack; `ops.trace` passes over it all."""
    return ops.sum(ops.diagonal(matrices, axis1=-2, axis2=-1), axis=-1)


@functools.cache
def _probe(d: int, r: int):
    noise = np.random.default_rng(0).normal(size=(d, r))
    return (noise * (PROBE / d**0.5)).astype("float32")
