"""Armijo backtracking along one direction."""

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
from keras import ops

from keras_secondorder.solvers.result import Status, verdict


class LineSearch(NamedTuple):
    """The outcome of a line search, all scalars.

    Attributes:
        t: the step accepted, zero when none was.
        value: f(t), or f0 when t is zero.
        evaluations: int32; how many times f was called.
        status: int32, a `Status`: SUFFICIENT_DECREASE, NO_DECREASE,
            NOT_A_DESCENT_DIRECTION, or NON_FINITE when f0 or the slope is.
    """

    t: Any
    value: Any
    evaluations: Any
    status: Any


class _State(NamedTuple):
    t: Any
    value: Any
    evaluations: Any
    status: Any


def backtracking_line_search(
    f: Callable[[Any], Any],
    f0: Any,
    slope: Any,
    *,
    t0: Any = 1.0,
    c1: Any = 1e-2,
    factor: Any = 0.8,
    max_steps: Any = 60,
) -> LineSearch:
    """Shrink a step until it decreases f enough (the Armijo condition).

    ```
    t = t0
    while not f(t) <= f0 + c1 t slope:  t = factor t
    ```

    A value of f that is not finite is no decrease, and the step shrinks further.

    Args:
        f: t -> f(t), from a scalar tensor to a scalar; it may be traced, so it must
            not change any variable.
        f0: scalar; f(0). Its dtype, float32 at least, is that of the result.
        slope: scalar; the derivative of f at 0. It must be negative.
        t0: scalar; the first step tried.
        c1: scalar; the fraction of the slope's promise to insist on.
        factor: scalar between 0 and 1; what a refused step is multiplied by.
        max_steps: an int; the largest number of evaluations.

    Returns:
        A `LineSearch`.

    Example:
        >>> found = backtracking_line_search(
        ...     lambda t: (t - 1.0) ** 2, f0=1.0, slope=-2.0, t0=4.0, factor=0.5
        ... )
        >>> print(float(found.t), float(found.value), int(found.evaluations))
        1.0 0.0 3

    References:
        Nocedal and Wright, "Numerical optimization" (2nd ed., 2006), algorithm 3.1
        and equation 3.4. The defaults of `c1`, `factor` and `max_steps` are those of
        the code for Martens, "Deep learning via Hessian-free optimization" (2010).
        We differ in returning t = 0 when no step is accepted.
    """
    f0 = ops.stop_gradient(ops.convert_to_tensor(f0))
    is_double = keras.backend.standardize_dtype(f0.dtype) == "float64"
    dtype = "float64" if is_double else "float32"

    def scalar(value: Any) -> Any:
        value = ops.convert_to_tensor(value, dtype=dtype)
        return ops.reshape(ops.stop_gradient(value), ())

    f0, slope, c1, factor = scalar(f0), scalar(slope), scalar(c1), scalar(factor)

    def step(state: _State) -> tuple[_State]:
        t = state.t
        value = scalar(f(t))
        is_enough = ops.isfinite(value) & (value <= f0 + c1 * t * slope)
        new = _State(
            t=ops.where(is_enough, t, factor * t),
            value=value,
            evaluations=state.evaluations + 1,
            status=verdict((is_enough, Status.SUFFICIENT_DECREASE)),
        )
        return (new,)

    start = _State(
        t=scalar(t0),
        value=f0,
        evaluations=ops.zeros((), dtype="int32"),
        status=verdict(
            (ops.logical_not(ops.isfinite(f0 + slope)), Status.NON_FINITE),
            (slope >= 0, Status.NOT_A_DESCENT_DIRECTION),
        ),
    )

    def goes_on(state: _State) -> Any:
        running = state.status == int(Status.RUNNING)
        return ops.logical_and(running, state.evaluations < max_steps)

    (end,) = ops.while_loop(goes_on, step, (start,))
    is_accepted = end.status == int(Status.SUFFICIENT_DECREASE)
    refused = ops.full((), int(Status.NO_DECREASE), dtype="int32")
    return LineSearch(
        t=ops.where(is_accepted, end.t, ops.zeros_like(end.t)),
        value=ops.where(is_accepted, end.value, f0),
        evaluations=end.evaluations,
        status=ops.where(end.status == int(Status.RUNNING), refused, end.status),
    )
