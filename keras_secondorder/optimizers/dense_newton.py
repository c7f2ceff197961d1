"""What the optimizers share that take a whole curvature matrix apart."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from keras import ops

from keras_secondorder import vectors
from keras_secondorder.arguments import (
    check_count,
    check_damping,
)
from keras_secondorder.optimizers.base import StepResult
from keras_secondorder.optimizers.flat import FlatOptimizer
from keras_secondorder.solvers.damping import AdaptiveDamping, reduction_ratio

#: The largest matrix that is taken apart; one of 5,000 rows takes minutes.
MAX_ROWS = 5_000
# Rows of it that are computed at a time.
CHUNK = 64


class Quadratic(NamedTuple):
    """The curvature `B` of a batch, taken apart: `T B T = Q diag(e) Q^T`.

    Attributes:
        e: Eigenvalues, shape `(r,)`.
        Q: Eigenvectors in the columns, shape `(P, r)`.
        T: What scales the parameters, shape `(P,)`; the damping is `lambda T^-2`.
        bend: `(x, solve) -> x'`: corrects a step for what the model leaves out.
        carried: Pairs of a variable and its value for the next step.
        complete: Whether `Q` spans everything, `r = P`.
    """

    e: object
    Q: object
    T: object
    bend: Callable | None = None
    carried: tuple = ()
    complete: bool = True


class DenseNewton(FlatOptimizer):
    """Base class of optimizers that solve a damped system exactly, for small models.

    ```
    T B T = Q diag(e) Q^T                                # the subclass
    delta = -T Q (e + lambda)^-1 Q^T T g
    rho   = (h(theta + delta) - h(theta)) / (g^T delta + 1/2 delta^T B delta)
    lambda from rho, and again, until h falls;   theta += learning_rate delta
    ```

    The eigenvalues are found once for a step, so that trying another `lambda` costs a
    value of the loss. A `lambda` that is a number or a schedule is taken as it is, and
    so is the step.

    Args:
        learning_rate: A number or a Keras schedule.
        damping: `lambda`: an `AdaptiveDamping`, a number, a schedule or "auto".
        trials: Most `lambda` that are tried in a step; the weights stay where none
            makes the loss fall.
        **kwargs: Keras's shared arguments.
    """

    #: What `damping="auto"` stands for.
    auto_damping = AdaptiveDamping(None, 1, 0.5, 1e-12, gamma_every=None)

    def __init__(self, learning_rate, damping, trials, **kwargs):
        check_damping(damping, kwargs, zero=True)
        check_count("trials", trials)
        super().__init__(learning_rate, **kwargs)
        self.damping = damping
        self.trials = trials

    def build_state(self, model):
        """Create the scalar."""
        super().build_state(model)
        self.eps = float(np.finfo(self.precision).eps)
        self.build_damping(self.auto_damping)

    def quadratic(self, objective) -> Quadratic:
        """The curvature of a batch, taken apart."""
        raise NotImplementedError

    def convex(self, e):
        """The eigenvalues as they are damped and inverted."""
        return e

    def eigh(self, matrix) -> tuple:
        """Eigenvalues and eigenvectors of a symmetric matrix.

        One that is not finite, of a step that will be skipped, counts as zero: not
        every backend takes it apart.
        """
        matrix = 0.5 * (matrix + ops.transpose(matrix))
        finite = ops.all(ops.isfinite(matrix))
        return ops.linalg.eigh(ops.where(finite, matrix, ops.zeros_like(matrix)))

    def dense(self, product):
        """The matrix of `product`, a function of parameter-space vectors.

        Raises:
            ValueError: It is too large.
        """
        if self.size > MAX_ROWS:
            raise ValueError(
                f"{type(self).__name__} takes apart a matrix of as many rows as the "
                f"model has parameters, at most {MAX_ROWS}. Received a model with "
                f"{self.size}. Use HessianFree or KFAC, which need no such matrix."
            )

        def row(i):
            unit = ops.one_hot(i, self.size, dtype=self.precision)
            return self.flatten(product(self.unflatten(unit)))

        return rows(row, self.size)

    def solve(self, model: Quadratic, v, damping):
        """`(B + lambda T^-2)^-1 v`, for a flat vector.

        Without damping it is the pseudo-inverse, to rounding. What of `v` lies outside
        the span of `Q` only meets the damping.
        """
        u = model.T * v
        b = times(ops.transpose(model.Q), u)
        d = self.convex(model.e) + damping
        rounding = self.eps * ops.max(ops.absolute(model.e))
        usable = ops.absolute(d) > ops.where(damping > 0, 0.0, rounding)
        x = times(model.Q, ops.where(usable, b / ops.where(usable, d, 1.0), 0.0))
        if not model.complete:
            # Under too little damping it would be made of rounding errors.
            damped = damping > 100 * rounding
            rest = u - times(model.Q, b)
            x = x + ops.where(damped, rest / ops.where(damped, damping, 1.0), 0.0)
        return model.T * x

    def step(self, objective):
        """One step on one batch."""
        k = ops.cast(self.iterations, "int32")
        linear = objective.linearize()
        loss, gradient, finite = self.loss_and_gradient(objective, linear)
        model = self.quadratic(objective)
        before = self.damping_at(k, loss, [gradient], objective.examples)

        def attempt(number, damping, rho, x, goes_on):
            delta = -self.solve(model, gradient, damping)
            y = times(ops.transpose(model.Q), delta / model.T)
            predicted = ops.sum(gradient * delta) + 0.5 * ops.sum(model.e * y * y)
            if model.bend is not None:
                delta = model.bend(delta, lambda v: self.solve(model, v, damping))
            change = objective.change(self.unflatten(delta), loss)
            rho = ops.cast(reduction_ratio(change, predicted), self.precision)
            if not self._adapted:
                return number + 1, damping, rho, delta, ops.zeros_like(goes_on)
            better = change < 0
            # Below the rounding of the loss, a comparison says nothing; it may be the
            # damping that makes the step so small.
            decided = ops.absolute(predicted) <= self.eps * ops.absolute(loss)
            trusted = ops.where(decided, ops.ones_like(rho), rho)
            damping = self.next_damping(damping, trusted)
            x = ops.where(better, delta, x)
            return number + 1, damping, rho, x, ~(better | decided)

        number, damping, rho, x, _ = ops.while_loop(
            lambda number, damping, rho, x, goes_on: goes_on,
            attempt,
            (
                ops.zeros((), "int32"),
                before,
                ops.zeros_like(before),
                ops.zeros_like(gradient),
                finite,
            ),
            maximum_iterations=self.trials,
        )
        finite = finite & ops.all(ops.isfinite(x))
        carried = model.carried
        if self._adapted:
            carried = (*carried, (self.damping_value, damping))
        for variable, value in carried:
            vectors.assign([variable], [value], where=finite)
        logs = {"damping": before, "rho": rho, "trials": number}
        return StepResult(
            self.unflatten(-x),
            finite,
            linear.aux.state,
            logs,
            loss,
            self.unflatten(gradient),
        )


def rows(row, count):
    """`[row(0), row(1), ...]`, several at a time.

    Args:
        row: A function of an integer scalar.
        count: How many, an integer or an integer scalar.
    """
    chunks = (count + CHUNK - 1) // CHUNK
    numbers = ops.reshape(ops.arange(chunks * CHUNK, dtype="int32"), (-1, CHUNK))
    # The numbers beyond the last are rows of zeros, which are cut off.
    found = ops.map(lambda part: ops.vectorized_map(row, part), numbers)
    return ops.reshape(found, (-1, found.shape[-1]))[:count]


def times(A, v):
    """`A v`; `@` rather than `ops.matmul`, which turns float64 to float32 on torch.

    Args:
        A: A matrix.
        v: A vector.
    """
    return ops.squeeze(A @ ops.expand_dims(v, 1), 1)
