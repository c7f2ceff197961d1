"""Preconditioned conjugate gradients that minimise a quadratic model."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from keras import ops

from keras_secondorder.solvers.result import (
    Iterates,
    Solution,
    Status,
    as_flat_vector,
    check_iterations,
    inner,
    larger,
    norm,
    verdict,
)


class _State(NamedTuple):
    j: Any  # iterations accepted so far
    x: Any
    r: Any  # B x - b, the gradient of q
    p: Any  # the search direction
    rho: Any  # r^T M^-1 r
    q_history: Any  # (max_iterations + 1,), q(x_0), q(x_1), ...
    kept: Any  # (K, n), the thinned iterates
    count: Any  # rows of `kept` in use
    residual_norm: Any
    status: Any


def conjugate_gradient(
    matvec: Callable[[Any], Any],
    b: Any,
    x0: Any = None,
    *,
    preconditioner: Callable[[Any], Any] | None = None,
    max_iterations: int = 250,
    epsilon: Any = 5e-4,
    window_min: int = 10,
    window_fraction: float = 0.1,
    rtol: Any = None,
    backtrack_base: float = 1.3,
) -> Solution:
    """Minimise q(x) = 1/2 x^T B x - b^T x by preconditioned conjugate gradients.

    ```
    r = B x0 - b;  y = M^-1 r;  p = -y;  rho = r^T y
    repeat  alpha = rho / (p^T B p)
            x     = x + alpha p
            r     = r + alpha B p
            y     = M^-1 r
            beta  = r^T y / rho;  rho = r^T y
            p     = -y + beta p
            q_j   = 1/2 (r - b)^T x
    until   j > k, q_j < 0 and (q_j - q_{j-k}) / q_j < k epsilon,
            where k = max(window_min, ceil(window_fraction j)),
         or ||r|| <= rtol ||b||,  or  p^T B p <= 0,  or  a number is not finite
    ```

    A step that meets p^T B p <= 0 or a non-finite number is not taken: `x` is then
    the iterate before it. All state has a fixed shape, so the call may stand
    inside a compiled function.

    Args:
        matvec: x -> B x for a flat x of shape (n,); B is symmetric.
        b: shape (n,), float32 or float64; the result has its dtype. It is minus
            the gradient when x is a step. Below a length of 1e-15 in float32 its
            square is lost, and it counts as zero.
        x0: shape (n,); where to start. Default: zero, which saves one `matvec`.
        preconditioner: r -> M^-1 r for a symmetric positive definite M. Default:
            the identity.
        max_iterations: a Python int, because it sizes the history of q.
        epsilon: the relative progress per iteration to stop at; None turns this
            test off.
        window_min: the smallest number of iterations k that progress is taken over.
        window_fraction: k as a fraction of the iterations done.
        rtol: the residual to stop at relative to ||b||; None turns this test off.
        backtrack_base: iterates ceil(backtrack_base ** i), i = 0, 1, ... are kept.

    Returns:
        A `Solution`, whose `iterates` holds the kept iterates, the last included.

    Raises:
        ValueError: `b` is not a flat float32 or float64 vector, `x0` has another
            shape, `max_iterations` is no integer, or `backtrack_base` is not above 1.

    Example:
        >>> import numpy as np
        >>> from keras import ops
        >>> B = ops.convert_to_tensor([[4.0, 1.0], [1.0, 3.0]])
        >>> b = ops.convert_to_tensor([1.0, 2.0])
        >>> solution = conjugate_gradient(lambda x: ops.matmul(B, x), b, rtol=1e-6)
        >>> print(np.round(ops.convert_to_numpy(solution.x), 4))
        [0.0909 0.6364]
        >>> int(solution.iterations)
        2

    References:
        Martens, "Second-order optimization for neural networks" (thesis, Toronto
        2016), algorithm 2 (preconditioned CG), and "Deep learning via Hessian-free
        optimization" (ICML 2010), section 4.4 (the progress test) and section 4.6
        (keeping iterates for backtracking). We add the tests of p^T B p and
        of finiteness, and that of the residual on request.
    """
    if not backtrack_base > 1:
        raise ValueError(
            "`backtrack_base` must be above 1, so that fewer and fewer iterates are "
            f"kept. Received {backtrack_base}. Use 1.3 for the thesis's choice."
        )
    check_iterations(max_iterations)
    b, dtype, machine_epsilon = as_flat_vector(b, "b")
    multiply = _detached(matvec, dtype)
    precondition = _detached(preconditioner or (lambda r: r), dtype)

    # Tables by iteration, so that no ceil is rounded on the device.
    window, is_kept, schedule = _tables(
        max_iterations, window_min, window_fraction, backtrack_base
    )
    numbers = ops.arange(max_iterations + 1, dtype="int32")
    residual_goal = ops.convert_to_tensor(0.0 if rtol is None else rtol, dtype=dtype)
    residual_goal = residual_goal * norm(b)

    if x0 is None:
        x0, r0 = ops.zeros_like(b), -b
    else:
        x0 = ops.stop_gradient(ops.convert_to_tensor(x0, dtype=dtype))
        if x0.shape != b.shape:
            raise ValueError(
                "`x0` must be a vector like `b`. Received the shapes "
                f"{tuple(x0.shape)} and {tuple(b.shape)}."
            )
        r0 = multiply(x0) - b
    y0 = precondition(r0)
    rho0, q0, residual_norm0 = inner(r0, y0), 0.5 * inner(r0 - b, x0), norm(r0)
    # Without a residual test CG runs on until the scalars underflow, and p^T B p = 0
    # would then read as negative curvature.
    rho_floor = float(np.finfo(dtype).tiny) / machine_epsilon

    def is_solved(residual_norm: Any, rho: Any) -> Any:
        vanishes = ops.logical_and(rho >= 0, rho <= rho_floor)
        return ops.logical_or(residual_norm <= residual_goal, vanishes)

    def has_stalled(j: Any, q: Any, q_history: Any) -> Any:
        if epsilon is None:
            return ops.zeros((), dtype="bool")
        k = ops.take(window, j)
        q_before = ops.take(q_history, larger(j - k, ops.zeros_like(j)))
        progress = (q - q_before) / ops.where(q < 0, q, -ops.ones_like(q))
        limit = ops.cast(k, dtype) * ops.convert_to_tensor(epsilon, dtype=dtype)
        return ops.logical_and(ops.logical_and(j > k, q < 0), progress < limit)

    def keep(kept: Any, count: Any, x: Any) -> Any:
        # 0 * count, not 0: JAX wants the indices in one dtype, also with x64 enabled.
        return ops.slice_update(kept, (count, 0 * count), ops.expand_dims(x, 0))

    def step(state: _State) -> tuple[_State]:
        Bp = multiply(state.p)
        curvature = inner(state.p, Bp)
        is_convex = curvature > 0
        alpha = state.rho / ops.where(is_convex, curvature, ops.ones_like(curvature))
        x = state.x + alpha * state.p
        r = state.r + alpha * Bp
        y = precondition(r)
        rho = inner(r, y)
        beta = rho / state.rho
        p = -y + beta * state.p
        q = 0.5 * inner(r - b, x)

        residual_norm = norm(r)
        # A NaN or Inf anywhere in x or r reaches one of these sums.
        is_finite = ops.isfinite(curvature) & ops.isfinite(rho + q + residual_norm)
        taken = ops.logical_and(is_convex, is_finite)
        j = state.j + ops.cast(taken, "int32")
        q_history = ops.where(ops.logical_and(taken, numbers == j), q, state.q_history)
        status = verdict(
            (ops.logical_not(ops.isfinite(curvature)), Status.NON_FINITE),
            (ops.logical_not(is_convex), Status.NEGATIVE_CURVATURE),
            (ops.logical_not(is_finite), Status.NON_FINITE),
            (is_solved(residual_norm, rho), Status.RESIDUAL),
            (rho < 0, Status.INDEFINITE_PRECONDITIONER),
            (has_stalled(j, q, q_history), Status.PROGRESS),
        )
        keeps = ops.logical_and(taken, ops.take(is_kept, j))
        kept = ops.cond(
            keeps,
            lambda: keep(state.kept, state.count, x),
            lambda: state.kept,
        )
        new = _State(
            j=j,
            x=ops.where(taken, x, state.x),
            r=r,
            p=p,
            rho=rho,
            q_history=q_history,
            kept=kept,
            count=state.count + ops.cast(keeps, "int32"),
            residual_norm=ops.where(taken, residual_norm, state.residual_norm),
            status=status,
        )
        return (new,)

    start = _State(
        j=ops.zeros((), dtype="int32"),
        x=x0,
        r=r0,
        p=-y0,
        rho=rho0,
        q_history=ops.where(numbers == 0, q0, ops.zeros_like(q0)),
        kept=ops.zeros((len(schedule), b.shape[0]), dtype=dtype),
        count=ops.zeros((), dtype="int32"),
        residual_norm=residual_norm0,
        status=verdict(
            (
                ops.logical_not(ops.isfinite(rho0 + q0 + residual_norm0)),
                Status.NON_FINITE,
            ),
            (is_solved(residual_norm0, rho0), Status.RESIDUAL),
            (rho0 < 0, Status.INDEFINITE_PRECONDITIONER),
        ),
    )

    def goes_on(state: _State) -> Any:
        running = state.status == int(Status.RUNNING)
        return ops.logical_and(running, state.j < max_iterations)

    (end,) = ops.while_loop(goes_on, step, (start,))

    # The last iterate joins the kept ones, unless its turn had come anyway.
    is_missing = ops.logical_not(ops.take(is_kept, end.j))
    kept = ops.cond(
        is_missing, lambda: keep(end.kept, end.count, end.x), lambda: end.kept
    )
    count = end.count + ops.cast(is_missing, "int32")
    slots = ops.arange(len(schedule), dtype="int32")
    number = ops.where(slots == count - 1, end.j, ops.convert_to_tensor(schedule))
    used = slots < count
    q = ops.take(end.q_history, ops.where(used, number, ops.zeros_like(number)))
    iterates = Iterates(
        x=kept,
        number=ops.where(used, number, -ops.ones_like(number)),
        q=ops.where(used, q, ops.full_like(q, np.inf)),
        count=count,
    )
    limit = ops.full((), int(Status.MAX_ITERATIONS), dtype="int32")
    status = ops.where(end.status == int(Status.RUNNING), limit, end.status)
    return Solution(end.x, status, end.j, end.residual_norm, iterates)


def _detached(function: Callable[[Any], Any], dtype: str) -> Callable[[Any], Any]:
    return lambda v: ops.stop_gradient(ops.cast(function(v), dtype))


def _tables(
    max_iterations: int, window_min: int, window_fraction: float, base: float
) -> tuple[Any, Any, np.ndarray]:
    """Return k by iteration, which iterations are kept, and their padded numbers."""
    j = range(max_iterations + 1)
    # Rounding first, because 0.1 * 30 is above 3 in floating point.
    window = [max(window_min, math.ceil(round(window_fraction * i, 9))) for i in j]
    scheduled, exponent = set(), 0
    while (number := math.ceil(base**exponent)) <= max_iterations:
        scheduled.add(number)
        exponent += 1
    schedule = np.array([*sorted(scheduled), 0], dtype="int32")  # one for the last
    return (
        ops.convert_to_tensor(np.array(window, dtype="int32")),
        ops.convert_to_tensor(np.array([i in scheduled for i in j])),
        schedule,
    )
