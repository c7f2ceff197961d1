"""Traces, eigenvalues and spectral densities from products with a matrix."""

import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from keras import ops

from keras_secondorder.arguments import check_count
from keras_secondorder.solvers import Status, lanczos, ritz_pairs
from keras_secondorder.solvers.result import project_out


class Eigenpairs(NamedTuple):
    """The eigenpairs that are largest in magnitude, the largest first.

    Attributes:
        values: Shape `(k,)`.
        vectors: Shape `(k, P)`, of unit length.
        residual_norms: Shape `(k,)`: `||A v - value v||`, which bounds the distance to
            an eigenvalue.
        products: How many products were spent.
    """

    values: Any
    vectors: Any
    residual_norms: Any
    products: int


class Density(NamedTuple):
    """A spectral density on a grid, and the nodes that it was smoothed from.

    Attributes:
        grid: NumPy array `(points,)`, ascending.
        density: NumPy array `(points,)`, non-negative; it integrates to 1.
        nodes: NumPy array `(samples * steps,)` of Ritz values.
        weights: NumPy array like it, summing to 1.
    """

    grid: np.ndarray
    density: np.ndarray
    nodes: np.ndarray
    weights: np.ndarray


def hutchinson(products: Callable, probes: list):
    """`mean of v . A v`, whose expectation is the trace for random signs `v`.

    Args:
        products: List of vectors to list of products.
        probes: Vectors of independent +-1.

    References:
        Hutchinson (1990).
    """
    terms = [ops.sum(v * Av) for v, Av in zip(probes, products(probes), strict=True)]
    return sum(terms[1:], terms[0]) / len(terms)


def hutch_plus_plus(products: Callable, sketch: list, probes: list):
    """Trace: exact on the range of a sketch, Hutchinson's estimate on the rest.

    ```
    Q = orthonormal basis of A S
    tr A ~ tr(Q^T A Q) + mean of  g . A g,   g = (I - Q Q^T) v
    ```

    Args:
        products: List of vectors to list of products.
        sketch: Columns of `S`, +-1.
        probes: The vectors `v`, +-1.

    References:
        Meyer, Musco, Musco & Woodruff (2021), algorithm 1.
    """
    Q, _ = ops.qr(ops.stack(products(sketch), axis=1))  # (P, s)
    columns = [Q[:, i] for i in range(Q.shape[1])]
    inside = [ops.sum(q * Aq) for q, Aq in zip(columns, products(columns), strict=True)]

    rows = ops.transpose(Q)
    outside = hutchinson(products, [project_out(v, rows) for v in probes])
    return sum(inside[1:], inside[0]) + outside


def lanczos_eigenpairs(
    matvec: Callable, draw: Callable, k: int, rtol: float, max_products: int
) -> Eigenpairs:
    """Lanczos with re-orthogonalisation, with more steps until `k` pairs are found.

    One start sees one vector of each eigenspace. Where its Krylov space is complete,
    the search goes on with a random start in the orthogonal complement.

    Args:
        matvec: Flat vector to its product.
        draw: `draw()` gives a random vector of shape `(P,)`, another each time.
        k: Number of pairs.
        rtol: Residual to reach, relative to the largest eigenvalue.
        max_products: Most products to spend.

    Raises:
        ValueError: `k` is not between 1 and `P`, `max_products` counts nothing, or a
            product is not finite.
    """
    start = draw()
    size = start.shape[0]
    check_count("k", k)
    check_count("max_products", max_products)
    if k > size:
        raise ValueError(
            f"`k` must lie between 1 and {size}, the size of the matrix. "
            f"Received k={k}."
        )
    first = max(2 * k, 20)
    held = [np.zeros(0), np.zeros(0), ops.zeros((0, size), start.dtype)]
    steps, spent = min(size, first), 0
    while True:
        known = len(held[0])
        run = lanczos(_within_complement(matvec, held[2]), start, steps)
        spent += steps
        count = _finite_count(run)
        pairs = ritz_pairs(run)
        values, residuals = (
            np.concatenate([old, ops.convert_to_numpy(new)[:count]])
            for old, new in zip(
                held[:2], (pairs.values, pairs.residual_norms), strict=True
            )
        )
        found = ops.concatenate([held[2], pairs.vectors[:count]])
        order = np.argsort(-np.abs(values), kind="stable")[:k]
        goal = rtol * np.abs(values[order[0]])
        if count == steps:
            settled = len(order) == k and np.all(residuals[order] <= goal)
            more = 2 * steps
        else:  # all that this start can see: does the complement hold more?
            settled = len(order) == k and np.all(order < known)
            more, known = first, len(values)
            held = [values, residuals, found]
            start = project_out(draw(), found)
        if settled or len(values) == size:
            break
        steps = min(size - known, more)
        if spent + steps > max_products:
            warnings.warn(
                f"{spent} products found the {k} largest eigenvalues to residuals of "
                f"at most {residuals[order].max():.2g}, not to {goal:.2g}. Raise "
                "`max_products` or `rtol`, or ask for fewer.",
                stacklevel=3,
            )
            break
    take = ops.convert_to_tensor(order.astype("int32"))
    dtype = found.dtype
    return Eigenpairs(
        ops.cast(ops.convert_to_tensor(values[order]), dtype),
        ops.take(found, take, axis=0),
        ops.cast(ops.convert_to_tensor(residuals[order]), dtype),
        spent,
    )


def _finite_count(run) -> int:
    """How many Lanczos steps were of use."""
    if int(run.status) == int(Status.NON_FINITE):
        raise ValueError(
            "A product with the matrix is not finite. Received NaN or infinity. Look "
            "for them in the data and in the weights of the model."
        )
    return int(run.count)


def _within_complement(matvec, rows):
    """The matrix, projected on what is orthogonal to some of its eigenvectors."""
    if rows.shape[0] == 0:
        return matvec
    return lambda v: project_out(matvec(v), rows)


def lanczos_density(
    matvec: Callable, starts: list, steps: int, points: int, width: float | None
) -> Density:
    """Stochastic Lanczos quadrature, smoothed by a Gaussian.

    ```
    density(t) = mean over starts of  sum_i w_i N(t; theta_i, width^2)
    ```

    with the Ritz values `theta_i` and the squared first components `w_i`.

    Args:
        matvec: Flat vector to its product.
        starts: Random normal vectors, shape `(P,)` each.
        steps: Lanczos steps from each.
        points: Number of grid points.
        width: Standard deviation of the Gaussian, or None.

    Raises:
        ValueError: The peaks are too narrow for the grid, or a product is not finite.
    """
    nodes, weights = [], []
    for start in starts:
        run = lanczos(matvec, start, min(steps, start.shape[0]))
        count, pairs = _finite_count(run), ritz_pairs(run)
        nodes.append(ops.convert_to_numpy(pairs.values)[:count].astype(float))
        w = ops.convert_to_numpy(pairs.weights)[:count].astype(float)
        weights.append(w / w.sum() / len(starts))
    nodes, weights = np.concatenate(nodes), np.concatenate(weights)
    reach = max(nodes.max() - nodes.min(), 1e-6 * np.abs(nodes).max(), 1e-30)
    if width is None:
        width = reach / min(100, points)
    if width < reach / points / 2:
        raise ValueError(
            f"Peaks of width {width:.2g} fall between {points} points on a spectrum "
            f"that is {reach:.2g} wide. Received width={width}, points={points}. Ask "
            f"for {math.ceil(reach / width)} points, or wider peaks."
        )
    grid = np.linspace(nodes.min() - 6 * width, nodes.max() + 6 * width, points)
    bells = np.exp(-0.5 * ((grid[:, None] - nodes) / width) ** 2)
    density = bells @ weights / (width * np.sqrt(2 * np.pi))
    # Six deviations hold all but 1e-9 of it; a coarse grid needs the rest put right.
    density = density / np.trapezoid(density, grid)
    return Density(grid, density, nodes, weights)
