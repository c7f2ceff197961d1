"""Numbers that sum up a spectrum, or compare two vectors or two matrices."""

from typing import NamedTuple

import numpy as np


def effective_rank(eigenvalues) -> float:
    """How many eigenvalues carry the trace.

    ```
    p_i = e_i / sum(e),   rank = exp(-sum p_i log p_i)
    ```

    Args:
        eigenvalues: Of a positive semi-definite matrix; rounding below 0 counts as 0.

    Returns:
        A number between 1 and the size of the matrix, or 0 for a zero matrix.

    Example:
        >>> from keras_secondorder.diagnostics import effective_rank
        >>> round(effective_rank([1.0, 1.0, 1.0, 0.0]), 6)
        3.0

    References:
        Roy & Vetterli (2007), *The effective rank*, definition 1.
    """
    e = np.maximum(np.asarray(eigenvalues, float), 0.0)
    if not e.sum() > 0:
        return 0.0
    p = e[e > 0] / e.sum()
    return float(np.exp(-np.sum(p * np.log(p))))


def cosine(u, v) -> float:
    """The cosine of the angle between two flat vectors; 0 where one is zero.

    Args:
        u: Array of shape `(P,)`.
        v: Array of shape `(P,)`.

    Returns:
        A number between -1 and 1.
    """
    u, v = np.asarray(u, float), np.asarray(v, float)
    lengths = np.linalg.norm(u) * np.linalg.norm(v)
    return float(u @ v / lengths) if lengths > 0 else 0.0


def subspace_share(v, basis) -> float:
    """The share of a vector's squared length inside a subspace.

    Args:
        v: Array of shape `(P,)`.
        basis: Array `(k, P)` with orthonormal rows.

    Returns:
        A number between 0 and 1; 0 for a zero vector.

    References:
        Gur-Ari, Roberts & Dyer (2018), *Gradient descent happens in a tiny subspace*,
        section 2, for the gradient and the top eigenvectors of the Hessian.
    """
    v, inside = np.asarray(v, float), np.asarray(basis, float) @ np.asarray(v, float)
    total = v @ v
    return float(inside @ inside / total) if total > 0 else 0.0


class Shares(NamedTuple):
    """How many eigenvalues stand out from zero, by 1% of the largest in magnitude.

    Attributes:
        positive: The share above, between 0 and 1.
        negative: The share that lies as far below zero.
        exact: Whether they were counted, and not estimated.
    """

    positive: float
    negative: float
    exact: bool


def shares(eigenvalues, weights, exact: bool) -> Shares:
    """The shares of eigenvalues beyond 1% of the largest on both sides.

    Of a spectral density by Lanczos quadrature, a node inside stands for many
    eigenvalues around it: the share nearer to zero than that cannot be told.

    Args:
        eigenvalues: Array `(n,)`: eigenvalues, or the nodes of a quadrature.
        weights: Array `(n,)` that sums to 1.
        exact: Whether these are all eigenvalues.
    """
    e, weights = np.asarray(eigenvalues, float), np.asarray(weights, float)
    bound = 0.01 * np.abs(e).max()
    above, below = weights[e > bound].sum(), weights[e < -bound].sum()
    return Shares(float(above), float(below), exact)


class NoiseScale(NamedTuple):
    """How noisy the gradient of single examples is beside its mean.

    Attributes:
        gradient_square: `|G|^2`, without the part that is noise; it may be negative.
        variance: `tr Sigma`, the total variance of the gradient of one example.
        scale: `tr Sigma / |G|^2`, the batch size at which both weigh the same in a
            step; None where `|G|^2` drowns in the noise.
    """

    gradient_square: float
    variance: float
    scale: float | None


def noise_scale(part_gradients, part_size: int) -> NoiseScale:
    """The gradient noise scale, from the gradients of equal parts of a batch.

    ```
    tr Sigma = size m / (m - 1) mean_i |g_i - g|^2,   g = mean_i g_i
    |G|^2    = |g|^2 - tr Sigma / (m size)
    ```

    Both are unbiased: the expectation over draws of the batch is that of all data.

    Args:
        part_gradients: Array `(m, P)`, one gradient for each of `m >= 2` parts.
        part_size: Number of examples in a part.

    Returns:
        A `NoiseScale`.

    References:
        McCandlish et al. (2018), *An empirical model of large-batch training*, equation
        2.9 and appendix A.1, with many small batches in place of one.
    """
    g = np.asarray(part_gradients, float)
    m, mean = len(g), g.mean(axis=0)
    spread = np.sum((g - mean) ** 2) / (m - 1)
    variance = part_size * spread
    square = mean @ mean - spread / m
    return NoiseScale(
        float(square), float(variance), float(variance / square) if square > 0 else None
    )
