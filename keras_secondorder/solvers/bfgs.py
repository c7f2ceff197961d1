"""BFGS, for functions of a few variables."""

from collections.abc import Callable
from typing import Any, NamedTuple

from keras import ops

from keras_secondorder.solvers.result import Status, as_flat_vector, inner, verdict

# An update whose curvature s.y is below this share of |s| |y| would spoil the inverse.
MIN_CURVATURE = 1e-8


class Minimum(NamedTuple):
    """Where BFGS stopped.

    Attributes:
        x: shape (n,); the best point met.
        value: f there.
        change: f there, less f at the start.
        iterations: int32; updates of x.
        evaluations: int32; how many times f was called.
        status: int32, a `Status`: RESIDUAL (the gradient is small), NO_DECREASE,
            MAX_ITERATIONS or NON_FINITE (f at the start is).
    """

    x: Any
    value: Any
    change: Any
    iterations: Any
    evaluations: Any
    status: Any


class _State(NamedTuple):
    x: Any
    value: Any
    gradient: Any
    H: Any  # approximate inverse Hessian, (n, n)
    t: Any  # the length to try next
    iterations: Any
    evaluations: Any
    status: Any


def bfgs(
    value_and_gradient: Callable[[Any], tuple],
    x0: Any,
    H0: Any = None,
    *,
    max_iterations: int = 20,
    max_evaluations: int = 60,
    gtol: float = 1e-5,
    c1: float = 1e-4,
    factor: float = 0.5,
) -> Minimum:
    """Minimise f by BFGS with a backtracking line search.

    ```
    p     = -H g
    t     = 1, factor, factor^2, ... until f(x + t p) <= f(x) + c1 t g.p
    s, y  = t p, g_new - g
    H     = (I - s y^T / s.y) H (I - y s^T / s.y) + s s^T / s.y    where s.y > 0
    ```

    Args:
        value_and_gradient: x -> (f(x), gradient), with a gradient of shape (n,); it
            may be traced.
        x0: shape (n,), float32 or float64.
        H0: shape (n, n); the first inverse Hessian. Default: the identity.
        max_iterations: the most updates of x.
        max_evaluations: the most calls of f.
        gtol: the length of the gradient to stop at, relative to that at x0.
        c1: the fraction of the slope's promise to insist on.
        factor: what a refused length is multiplied by.

    Returns:
        A `Minimum`.

    Example:
        >>> from keras import ops
        >>> a = ops.convert_to_tensor([1.0, 10.0])
        >>> found = bfgs(lambda x: (0.5 * ops.sum(a * x * x), a * x), ops.ones(2))
        >>> float(found.value) < 1e-8
        True

    References:
        Nocedal and Wright, "Numerical optimization" (2nd ed., 2006), algorithm 6.1
        and equation 6.17; algorithm 3.1 for the line search, which they would have
        meet the Wolfe conditions: here an update without curvature is left out.
    """
    x0, dtype, _ = as_flat_vector(x0, "x0")
    identity = ops.eye(x0.shape[0], dtype=dtype)
    H0 = identity if H0 is None else ops.cast(H0, dtype)

    def evaluate(x: Any) -> tuple:
        value, gradient = value_and_gradient(x)
        return ops.cast(value, dtype), ops.stop_gradient(ops.cast(gradient, dtype))

    def times(H: Any, v: Any) -> Any:
        return ops.sum(H * ops.expand_dims(v, 0), axis=1)

    def outer(u: Any, v: Any) -> Any:
        return ops.expand_dims(u, 1) * ops.expand_dims(v, 0)

    value0, gradient0 = evaluate(x0)
    goal = gtol * ops.sqrt(inner(gradient0, gradient0))

    def updated(H: Any, s: Any, y: Any) -> Any:
        sy = inner(s, y)
        scale = ops.sqrt(inner(s, s) * inner(y, y))
        usable = sy > MIN_CURVATURE * scale
        safe = ops.where(usable, sy, ops.ones_like(sy))
        Hy = times(H, y)
        new = (
            H
            - (outer(s, Hy) + outer(Hy, s)) / safe
            + outer(s, s) * ((inner(y, Hy) / safe + 1.0) / safe)
        )
        return ops.where(usable, new, H)

    def step(state: _State) -> tuple[_State]:
        p = -times(state.H, state.gradient)
        slope = inner(p, state.gradient)
        x = state.x + state.t * p
        value, gradient = evaluate(x)
        enough = ops.isfinite(value) & (value <= state.value + c1 * state.t * slope)
        enough = enough & ops.all(ops.isfinite(gradient)) & (slope < 0)
        H = updated(state.H, x - state.x, gradient - state.gradient)
        small = ops.sqrt(inner(gradient, gradient)) <= goal
        tried = state.t < 1e-6  # some twenty halvings
        return (
            _State(
                x=ops.where(enough, x, state.x),
                value=ops.where(enough, value, state.value),
                gradient=ops.where(enough, gradient, state.gradient),
                H=ops.where(enough, H, state.H),
                t=ops.where(enough, ops.ones_like(state.t), factor * state.t),
                iterations=state.iterations + ops.cast(enough, "int32"),
                evaluations=state.evaluations + 1,
                status=verdict(
                    (enough & small, Status.RESIDUAL),
                    (slope >= 0, Status.NO_DECREASE),
                    (ops.logical_not(enough) & tried, Status.NO_DECREASE),
                ),
            ),
        )

    def goes_on(state: _State) -> Any:
        running = state.status == int(Status.RUNNING)
        left = (state.iterations < max_iterations) & (
            state.evaluations < max_evaluations
        )
        return running & left

    finite = ops.isfinite(value0) & ops.all(ops.isfinite(gradient0))
    start = _State(
        x=x0,
        value=value0,
        gradient=gradient0,
        H=H0,
        t=ops.ones((), dtype=dtype),
        iterations=ops.zeros((), dtype="int32"),
        evaluations=ops.ones((), dtype="int32"),
        status=verdict(
            (ops.logical_not(finite), Status.NON_FINITE),
            (inner(gradient0, gradient0) == 0, Status.RESIDUAL),
        ),
    )
    (end,) = ops.while_loop(goes_on, step, (start,))
    limit = ops.full((), int(Status.MAX_ITERATIONS), dtype="int32")
    status = ops.where(end.status == int(Status.RUNNING), limit, end.status)
    change = end.value - value0
    return Minimum(end.x, end.value, change, end.iterations, end.evaluations, status)
