"""Lanczos with full re-orthogonalisation, and the Ritz pairs that it gives."""

from collections.abc import Callable
from typing import Any, NamedTuple

from keras import ops

from keras_secondorder.solvers.result import (
    Status,
    as_flat_vector,
    inner,
    larger,
    norm,
    project_out,
    verdict,
)


class Tridiagonal(NamedTuple):
    """The result of `lanczos`: A Q^T = Q^T T up to one last residual vector.

    Attributes:
        alphas: shape (m,); the diagonal of T, zero from `count` on.
        betas: shape (m,); betas[j] couples j and j + 1, and betas[count - 1] is the
            length of the residual vector (zero for an invariant subspace).
        basis: shape (m, n); orthonormal rows, zero from `count` on.
        count: int32 scalar; how many rows are in use, m unless Lanczos broke down.
        status: int32 scalar, a `Status`: MAX_ITERATIONS when all m steps ran,
            INVARIANT_SUBSPACE or NON_FINITE.
    """

    alphas: Any
    betas: Any
    basis: Any
    count: Any
    status: Any


class RitzPairs(NamedTuple):
    """Approximate eigenpairs, ascending; entries from `count` on are zero.

    Attributes:
        values: shape (m,); the eigenvalues of T.
        vectors: shape (m, n); a unit vector per row.
        residual_norms: shape (m,); ||A y - value y|| for each row y, which bounds
            the distance of the value to an eigenvalue.
        weights: shape (m,); squared first components of T's eigenvectors, which are
            the weights of Gauss quadrature for the spectral density seen from v0.
        count: int32 scalar; how many entries are in use.
    """

    values: Any
    vectors: Any
    residual_norms: Any
    weights: Any
    count: Any


class _State(NamedTuple):
    alphas: Any
    betas: Any
    basis: Any
    q: Any
    q_old: Any
    beta: Any
    scale: Any  # the largest entry of T so far, a measure of ||A||
    count: Any
    status: Any


def lanczos(
    matvec: Callable[[Any], Any], v0: Any, m: int, *, tolerance: Any = None
) -> Tridiagonal:
    """Run m steps of Lanczos on a symmetric A, keeping the basis orthonormal.

    ```
    q = v0 / ||v0||
    repeat m times  w     = A q
                    alpha = q^T w
                    w     = w - alpha q - beta q_old
                    w     = w - Q^T (Q w),  twice      # full re-orthogonalisation
                    beta  = ||w||
                    q_old, q = q, w / beta
    ```

    When beta falls below `tolerance` times the size of T, the Krylov space is
    invariant and complete: the remaining entries stay zero. A NaN or Inf ends the
    run in the same way, before the step that met it.

    Args:
        matvec: v -> A v for a flat v of shape (n,).
        v0: shape (n,), float32 or float64; the start, of any length but zero.
        m: a Python int; the number of steps, and of rows kept in memory.
        tolerance: a scalar. Default: 100 times the machine epsilon.

    Returns:
        A `Tridiagonal`.

    Raises:
        ValueError: `m` is not positive or `v0` is not a flat float vector.

    Example:
        >>> import numpy as np
        >>> from keras import ops
        >>> a = ops.convert_to_tensor([1.0, 2.0, 2.0, 4.0])  # three eigenvalues
        >>> found = lanczos(lambda v: a * v, ops.ones(4), m=4)
        >>> int(found.count)
        3
        >>> print(np.round(ops.convert_to_numpy(ritz_pairs(found).values[:3]), 3))
        [1. 2. 4.]

    References:
        Golub and Van Loan, "Matrix computations" (4th ed., 2013), section 10.1, and
        section 10.3 for complete re-orthogonalisation; Parlett, "The symmetric
        eigenvalue problem" (1998), section 6.9, for why twice is enough.
    """
    if m < 1:
        raise ValueError(
            f"`m` must be at least 1. Received {m}. Ask for one step or more."
        )
    v0, dtype, machine_epsilon = as_flat_vector(v0, "v0")
    if tolerance is None:
        tolerance = 100 * machine_epsilon
    tolerance = ops.convert_to_tensor(tolerance, dtype=dtype)
    numbers = ops.arange(m, dtype="int32")

    def step(j: Any, state: _State) -> _State:
        q = state.q
        w = ops.stop_gradient(ops.cast(matvec(q), dtype))
        alpha = inner(q, w)
        w = w - alpha * q - state.beta * state.q_old
        # 0 * j, not 0: JAX wants the indices in one dtype, also with x64 enabled.
        basis = ops.slice_update(state.basis, (j, 0 * j), ops.expand_dims(q, 0))
        w = project_out(w, basis)
        beta = norm(w)

        running = state.status == int(Status.RUNNING)
        is_finite = ops.isfinite(alpha) & ops.isfinite(beta)
        here = running & is_finite
        alpha = ops.where(here, alpha, ops.zeros_like(alpha))
        beta = ops.where(here, beta, ops.zeros_like(beta))
        scale = larger(state.scale, larger(ops.abs(alpha), beta))
        goes_on = here & (beta > tolerance * scale)
        beta = ops.where(goes_on, beta, ops.zeros_like(beta))
        ended = verdict(
            (ops.logical_not(is_finite), Status.NON_FINITE),
            (ops.logical_not(goes_on), Status.INVARIANT_SUBSPACE),
        )
        w = ops.where(goes_on, w, ops.zeros_like(w))
        q_next = w / ops.where(goes_on, beta, ops.ones_like(beta))
        return _State(
            alphas=ops.where(numbers == j, alpha, state.alphas),
            betas=ops.where(numbers == j, beta, state.betas),
            basis=basis,
            q=q_next,
            q_old=q,
            beta=beta,
            scale=scale,
            count=state.count + ops.cast(here, "int32"),
            status=ops.where(running, ended, state.status),
        )

    length = norm(v0)
    is_usable = ops.isfinite(length) & (length > 0)
    q = ops.where(is_usable, v0, ops.zeros_like(v0))
    q = q / ops.where(is_usable, length, ops.ones_like(length))
    start = _State(
        alphas=ops.zeros((m,), dtype=dtype),
        betas=ops.zeros((m,), dtype=dtype),
        basis=ops.zeros((m, v0.shape[0]), dtype=dtype),
        q=q,
        q_old=ops.zeros_like(q),
        beta=ops.zeros((), dtype=dtype),
        scale=ops.zeros((), dtype=dtype),
        count=ops.zeros((), dtype="int32"),
        status=verdict(
            (ops.logical_not(ops.isfinite(length)), Status.NON_FINITE),
            (length == 0, Status.INVARIANT_SUBSPACE),
        ),
    )
    end = ops.fori_loop(0, m, step, start)
    done = ops.full((), int(Status.MAX_ITERATIONS), dtype="int32")
    status = ops.where(end.status == int(Status.RUNNING), done, end.status)
    # The row of a step that met a NaN is in the basis, but has no alpha.
    used = ops.expand_dims(numbers < end.count, 1)
    basis = ops.where(used, end.basis, ops.zeros_like(end.basis))
    return Tridiagonal(end.alphas, end.betas, basis, end.count, status)


def ritz_pairs(tridiagonal: Tridiagonal) -> RitzPairs:
    """Diagonalise T and carry its eigenvectors back to the space of A.

    ```
    T = S diag(values) S^T
    vectors        = S^T Q
    residual_norms = betas[count - 1] * |S[count - 1, :]|
    weights        = S[0, :]^2
    ```

    Args:
        tridiagonal: what `lanczos` returned.

    Returns:
        `RitzPairs`, ascending, with zeros from `count` on.

    Example:
        >>> from keras import ops
        >>> a = ops.convert_to_tensor([1.0, 2.0, 3.0])
        >>> pairs = ritz_pairs(lanczos(lambda v: a * v, ops.ones(3), m=2))
        >>> [round(float(value), 3) for value in pairs.values]
        [1.184, 2.816]

    References:
        Golub and Van Loan, "Matrix computations" (4th ed., 2013), section 10.1
        (Ritz pairs and their residuals) and section 10.2 (quadrature weights).
    """
    alphas, betas, basis, count, _ = tridiagonal
    m = alphas.shape[0]
    numbers = ops.arange(m, dtype="int32")
    used = numbers < count
    couplings = ops.where(numbers < count - 1, betas, ops.zeros_like(betas))

    # T is scaled to entries of at most 1. Unused entries become eigenvalues above
    # all others (no sum of three entries exceeds 3), so they sort to the end.
    scale = ops.max(larger(ops.abs(alphas), couplings))
    scale = ops.where(scale > 0, scale, ops.ones_like(scale))
    diagonal = ops.where(used, alphas / scale, 4 * ops.ones_like(alphas))
    beside = couplings[: m - 1] / scale
    T = ops.diag(diagonal) + ops.diag(beside, k=1) + ops.diag(beside, k=-1)
    values, S = ops.linalg.eigh(T)

    zeros = ops.zeros_like(values)
    last = ops.expand_dims(numbers == count - 1, 1)
    # Row count - 1 of S, and the residual length that goes with it.
    last_row = ops.sum(ops.where(last, S, ops.zeros_like(S)), axis=0)
    beta = ops.sum(ops.where(numbers == count - 1, betas, zeros))
    return RitzPairs(
        values=ops.where(used, values * scale, zeros),
        vectors=ops.transpose(S) @ basis,
        residual_norms=ops.where(used, beta * ops.abs(last_row), zeros),
        weights=ops.where(used, S[0] * S[0], zeros),
        count=count,
    )
