"""Going back over the iterates of conjugate gradients, to the best on other data."""

from collections.abc import Callable
from typing import Any, NamedTuple

from keras import ops

from keras_secondorder.solvers.result import Iterates


class Choice(NamedTuple):
    """The iterate chosen.

    Attributes:
        x: shape (n,).
        row: int32; its row among the kept iterates.
        number: int32; the CG iteration that made it.
        value: f there.
    """

    x: Any
    row: Any
    number: Any
    value: Any


def backtrack(f: Callable[[Any], Any], iterates: Iterates) -> Choice:
    """Go back from the last iterate while that makes f smaller.

    ```
    i = count - 1
    while i > 0 and f(x_{i-1}) < f(x_i):  i = i - 1
    ```

    A value that is not finite counts as infinite.

    Args:
        f: x -> f(x), a scalar, e.g. the loss on other data than the quadratic's; it
            may be traced.
        iterates: what `conjugate_gradient` kept, with at least one row.

    Returns:
        A `Choice`.

    Example:
        >>> from keras import ops
        >>> from keras_secondorder.solvers import conjugate_gradient
        >>> a = ops.convert_to_tensor([1.0, 4.0, 9.0])
        >>> found = conjugate_gradient(lambda x: a * x, ops.ones(3), rtol=1e-6)
        >>> int(backtrack(lambda x: ops.sum(x * x), found.iterates).number)
        1

    References:
        Martens, "Deep learning via Hessian-free optimization" (ICML 2010), section
        4.6; thesis (2016), section 4.11.
    """

    def value_at(row: Any) -> Any:
        value = f(ops.take(iterates.x, row, axis=0))
        return ops.where(ops.isfinite(value), value, ops.full_like(value, float("inf")))

    def step(row: Any, value: Any, goes_on: Any) -> tuple:
        before = value_at(row - 1)
        better = before < value
        return (
            ops.where(better, row - 1, row),
            ops.where(better, before, value),
            better,
        )

    last = iterates.count - 1
    row, value, _ = ops.while_loop(
        lambda row, value, goes_on: ops.logical_and(goes_on, row > 0),
        step,
        (last, value_at(last), ops.ones((), dtype="bool")),
    )
    return Choice(
        ops.take(iterates.x, row, axis=0), row, ops.take(iterates.number, row), value
    )
