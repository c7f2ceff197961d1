"""What a solver hands back, why it stopped, and what to do about it."""

import enum
import numbers
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops


class Status(enum.IntEnum):
    """Why a solver stopped; `describe` turns one into a sentence of advice."""

    RUNNING = 0
    RESIDUAL = 1
    LEAST_SQUARES = 2
    PROGRESS = 3
    MAX_ITERATIONS = 4
    NEGATIVE_CURVATURE = 5
    NON_FINITE = 6
    INDEFINITE_PRECONDITIONER = 7
    ILL_CONDITIONED = 8
    SOLUTION_NORM = 9
    INVARIANT_SUBSPACE = 10
    SUFFICIENT_DECREASE = 11
    NO_DECREASE = 12
    NOT_A_DESCENT_DIRECTION = 13


ADVICE = {
    Status.RUNNING: "The solver has not stopped yet; nothing can be concluded.",
    Status.RESIDUAL: "The residual met its tolerance; nothing to do.",
    Status.LEAST_SQUARES: (
        "The system is singular and has no exact solution; this is its "
        "least-squares solution of minimum length, so add damping if you "
        "expected a regular system."
    ),
    Status.PROGRESS: (
        "The quadratic stopped decreasing by more than `epsilon` per iteration; "
        "lower `epsilon` (HessianFree: `cg_tolerance`) for a more exact solution."
    ),
    Status.MAX_ITERATIONS: (
        "The iteration limit came first; raise it, improve the preconditioner "
        "or add damping."
    ),
    Status.NEGATIVE_CURVATURE: (
        "A direction p had p^T B p <= 0; add damping, or use a positive "
        "semi-definite curvature matrix such as the Gauss-Newton."
    ),
    Status.NON_FINITE: (
        "A NaN or Inf appeared; the last finite iterate is returned, so check the "
        "batch and the scale of the parameters."
    ),
    Status.INDEFINITE_PRECONDITIONER: (
        "The preconditioner gave r^T M^-1 r < 0; it must be symmetric positive "
        "definite, so add damping to it."
    ),
    Status.ILL_CONDITIONED: (
        "The condition estimate passed its limit and the smallest direction was "
        "dropped; add damping, or raise the limit if that direction matters."
    ),
    Status.SOLUTION_NORM: (
        "The next iterate was longer than `maxxnorm`; add damping, or raise "
        "`maxxnorm` if so long a solution is meant."
    ),
    Status.INVARIANT_SUBSPACE: (
        "The Krylov space is exhausted, so the values found are exact; start from "
        "another vector to see the remaining ones."
    ),
    Status.SUFFICIENT_DECREASE: "The step decreased f enough; nothing to do.",
    Status.NO_DECREASE: (
        "No step tried decreased f enough and t = 0 is returned; add damping, "
        "allow more steps or check the slope."
    ),
    Status.NOT_A_DESCENT_DIRECTION: (
        "The slope is not negative, so no step was tried; check the sign of the "
        "direction or add damping."
    ),
}


class Iterates(NamedTuple):
    """The iterates conjugate gradients kept, oldest first, for backtracking.

    Attributes:
        x: shape (K, n); rows from `count` on are zero.
        number: int32, shape (K,); the iteration of each row, -1 where unused.
        q: shape (K,); the quadratic at each row, infinity where unused.
        count: int32 scalar; row `count - 1` is the solution itself.
    """

    x: Any
    number: Any
    q: Any
    count: Any


class Estimates(NamedTuple):
    """What MINRES-QLP learns about the system on the way, as scalars.

    Attributes:
        normal_residual_norm: ||A r|| at the iterate before the last.
        matrix_norm: a lower bound on ||A||.
        condition: an estimate of the condition number of A on its range.
        solution_norm: ||x||.
    """

    normal_residual_norm: Any
    matrix_norm: Any
    condition: Any
    solution_norm: Any


class Solution(NamedTuple):
    """The outcome of a linear solve: a value that passes through compiled code.

    Attributes:
        x: shape (n,); always the last iterate that was finite.
        status: int32 scalar, a `Status`; see `describe`.
        iterations: int32 scalar; how many iterations `x` is made of.
        residual_norm: scalar; ||b - A x||, from the solver's own recurrence.
        iterates: the kept `Iterates` of conjugate gradients, else None.
        estimates: the `Estimates` of MINRES-QLP, else None.
    """

    x: Any
    status: Any
    iterations: Any
    residual_norm: Any
    iterates: Iterates | None = None
    estimates: Estimates | None = None


def describe(status: Any) -> str:
    """Say in a name and one sentence why a solver stopped and what to do.

    ```
    describe(status) = name of status + ": " + advice
    ```

    Args:
        status: a `Status`, an int, or the concrete int32 scalar in a result (not
            a tracer: call this outside compiled code).

    Returns:
        A string such as "RESIDUAL: The residual met its tolerance; ...".

    Raises:
        ValueError: the number is not one of `Status`.

    Example:
        >>> describe(1)
        'RESIDUAL: The residual met its tolerance; nothing to do.'

    References:
        Giving a failure its advice follows Lineax's `RESULTS`
        (docs.kidger.site/lineax, "Solution").
    """
    status = Status(int(ops.convert_to_numpy(status)))
    return f"{status.name}: {ADVICE[status]}"


def verdict(*cases: tuple[Any, Status]) -> Any:
    """Pick the status of the first case that holds.

    Args:
        *cases: pairs of a boolean scalar and the `Status` it means, most telling
            first.

    Returns:
        An int32 scalar, `Status.RUNNING` when no case holds.
    """
    status = ops.convert_to_tensor(int(Status.RUNNING), dtype="int32")
    for condition, value in reversed(cases):
        value = ops.convert_to_tensor(int(value), dtype="int32")
        status = ops.where(condition, value, status)
    return status


def as_flat_vector(b: Any, name: str) -> tuple[Any, str, float]:
    """Check a right-hand side or a starting vector.

    Args:
        b: what the user passed.
        name: what the user knows it by.

    Returns:
        The tensor, the name of its dtype, and the machine epsilon of that dtype.

    Raises:
        ValueError: `b` is not a flat float32 or float64 vector.
    """
    # No graph is kept through a solver: on torch it would grow with every iteration.
    b = ops.stop_gradient(ops.convert_to_tensor(b))
    dtype = keras.backend.standardize_dtype(b.dtype)
    if len(b.shape) != 1 or dtype not in ("float32", "float64"):
        raise ValueError(
            f"`{name}` must be a flat vector of float32 or float64. "
            f"Received shape {tuple(b.shape)} and dtype {dtype}. "
            "Flatten it, and cast half precision to float32."
        )
    return b, dtype, float(np.finfo(dtype).eps)


def check_iterations(max_iterations: Any) -> None:
    """Refuse a limit that counts no iterations.

    Args:
        max_iterations: what the user passed.

    Raises:
        ValueError: It is no integer of at least 0.
    """
    if not isinstance(max_iterations, numbers.Integral) or max_iterations < 0:
        raise ValueError(
            "`max_iterations` must be an integer of at least 0. "
            f"Received max_iterations={max_iterations!r}."
        )


# Arithmetic that the solvers share. `ops.maximum`, `ops.dot` and `ops.matmul` are
# avoided throughout: on torch, Keras computes them in float32 when given float64.


def inner(u: Any, v: Any) -> Any:
    """Multiply two flat vectors by a sum, which no GPU rounds to TF32.

    Args:
        u: shape (n,).
        v: shape (n,).

    Returns:
        The scalar u^T v.
    """
    return ops.sum(u * v)


def norm(u: Any) -> Any:
    """Measure the Euclidean length of a flat vector, also where squares overflow.

    Args:
        u: shape (n,).

    Returns:
        The scalar ||u||.
    """
    largest = ops.max(ops.abs(u))
    usable = ops.isfinite(largest) & (largest > 0)
    unit = ops.where(usable, largest, ops.ones_like(largest))
    u = u / unit
    return unit * ops.sqrt(inner(u, u))


def project_out(w: Any, Q: Any) -> Any:
    """Make a vector orthogonal to others, in two passes.

    Args:
        w: shape (n,).
        Q: shape (m, n); orthonormal or zero rows.

    Returns:
        w - Q^T (Q w), of shape (n,).
    """
    # `@` rather than `ops.matmul`, which turns float64 to float32 on torch.
    for _ in range(2):
        overlap = Q @ ops.expand_dims(w, 1)  # (m, 1)
        w = w - ops.squeeze(ops.transpose(overlap) @ Q, 0)
    return w


def larger(a: Any, b: Any) -> Any:
    """Pick the larger, entry by entry, in the dtype of both.

    Args:
        a: a tensor.
        b: a tensor of the same dtype.

    Returns:
        a where a > b, else b.
    """
    return ops.where(a > b, a, b)


def smaller(a: Any, b: Any) -> Any:
    """Pick the smaller, entry by entry, in the dtype of both.

    Args:
        a: a tensor.
        b: a tensor of the same dtype.

    Returns:
        a where a < b, else b.
    """
    return ops.where(a < b, a, b)


def largest(*values: Any) -> Any:
    """Find the largest absolute value.

    Args:
        *values: scalars of one dtype.

    Returns:
        A scalar.
    """
    return ops.max(ops.abs(ops.stack(values)))


def divide(a: Any, b: Any) -> Any:
    """Divide, and give zero for any division by zero.

    Args:
        a: a tensor.
        b: a scalar or a tensor of the same shape.

    Returns:
        a / b where b is not zero, else zero.
    """
    is_zero = b == 0
    return ops.where(is_zero, ops.zeros_like(a), a / ops.where(is_zero, 1 + b, b))


def hypot(a: Any, b: Any) -> Any:
    """Add in quadrature, without overflow or underflow of the squares.

    Args:
        a: a scalar.
        b: a scalar.

    Returns:
        The scalar sqrt(a^2 + b^2).
    """
    scale = larger(ops.abs(a), ops.abs(b))
    a, b = divide(a, scale), divide(b, scale)
    return scale * ops.sqrt(a * a + b * b)
