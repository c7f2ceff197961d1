"""Matrix momentum: momentum that the curvature decides on."""

import keras
import numpy as np
from keras import ops

from keras_secondorder import vectors
from keras_secondorder.arguments import (
    check_at_least,
    check_one_of,
    check_range,
)
from keras_secondorder.curvature.products import gauss_newton_products
from keras_secondorder.optimizers.base import StepResult
from keras_secondorder.optimizers.flat import FlatOptimizer
from keras_secondorder.solvers.schedules import at_step

# How slowly the estimate of the largest eigenvalue comes down.
DECAY = 0.95
# Power iterations of the first step.
FIRST = 10


@keras.saving.register_keras_serializable(package="keras_secondorder")
class MatrixMomentum(FlatOptimizer):
    """Matrix momentum (Orr & Leen): Newton's step, reached little by little.

    ```
    v      = (I - epsilon (C + lambda I)) v - epsilon g
    theta += learning_rate * v
    ```

    Where the gradient stays, `v` goes to `-(C + lambda I)^-1 g`. Steep directions
    forget at once, flat ones gather momentum. `C` is the Gauss-Newton matrix: one
    product a step, and one more for `epsilon="auto"`.

    Args:
        learning_rate: A number or a Keras schedule: the share of Newton's step.
        damping: `lambda`, a number or a schedule.
        epsilon: A number, a schedule, or "auto" for `1 / (largest eigenvalue of C +
            lambda)`, which power iteration follows: ten products at the first step
            and one at each other.
        seed: Seed of the vector that it starts from.
        **kwargs: Keras's shared arguments.

    Raises:
        ValueError: Arguments out of range.

    Example:
        >>> import keras, keras_secondorder as kso
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile(optimizer=kso.MatrixMomentum(), loss="mse")
        >>> x = keras.random.normal((64, 4), seed=0)
        >>> history = model.fit(x, x[:, :1], batch_size=64, epochs=60, verbose=0)
        >>> history.history["loss"][-1] < 1e-2 * history.history["loss"][0]
        True

    References:
        Orr & Leen (1997), equation 8; George (2017), thesis, section 3.4.2, equation
        3.6. They have the Hessian and a constant `epsilon`; their learning rate is
        `epsilon * learning_rate` here, and their step is `learning_rate * v`.
    """

    def __init__(
        self, learning_rate=0.3, damping=0.1, epsilon="auto", seed: int = 0, **kwargs
    ):
        if isinstance(damping, int | float):
            check_at_least("damping", damping, 0)
        if isinstance(epsilon, str):
            check_one_of("epsilon", epsilon, ("auto",))
        elif isinstance(epsilon, int | float):
            check_range("epsilon", epsilon, 0)
        super().__init__(learning_rate, **kwargs)
        self.damping = damping
        self.epsilon = epsilon
        self.seed = seed

    def build_state(self, model):
        """Create the velocity and the state of the power iteration."""
        super().build_state(model)
        shape, dtype = (self.size,), self.precision
        self.velocity = self.add_variable(shape, "zeros", dtype, name="velocity")
        self._auto = isinstance(self.epsilon, str)
        if self._auto:
            start = np.random.default_rng(self.seed).normal(size=shape)
            start /= np.linalg.norm(start)
            self.top = self.add_variable(shape, "zeros", dtype, name="top")
            self.top.assign(start.astype(dtype))
            self.top_value = self.add_scalar("top_value", 0.0)

    def step(self, objective):
        """One step on one batch."""
        k = ops.cast(self.iterations, "int32")
        linear = objective.linearize()
        loss, g, finite = self.loss_and_gradient(objective, linear)
        C = gauss_newton_products(objective)

        def product(v):
            return self.flatten(C.product(self.unflatten(v)))

        damping = ops.cast(at_step(self.damping, k), self.precision)
        if self._auto:
            q, top = self._follow_top(product, k)
            epsilon = 1.0 / (top + damping + 1e-30)
            carried = [(self.top, q), (self.top_value, top)]
        else:
            epsilon = ops.cast(at_step(self.epsilon, k), self.precision)
            carried = []

        (v,) = vectors.values([self.velocity])
        v = v - epsilon * (product(v) + damping * v) - epsilon * g
        finite = finite & ops.all(ops.isfinite(v))
        for variable, value in [*carried, (self.velocity, v)]:
            vectors.assign([variable], [value], where=finite)
        logs = {"epsilon": epsilon, "velocity": ops.sqrt(ops.sum(v * v))}
        return StepResult(
            self.unflatten(-v),
            finite,
            linear.aux.state,
            logs,
            loss,
            self.unflatten(g),
        )

    def _follow_top(self, product, k) -> tuple:
        """The top eigenvector and its value, a power iteration or ten later."""
        q, before = vectors.values([self.top, self.top_value])

        def iterate(number, q, value):
            Cq = product(q)
            value = ops.sqrt(ops.sum(Cq * Cq))
            q = ops.where(value > 0, Cq / ops.where(value > 0, value, 1.0), q)
            return number + 1, q, value

        count = ops.where(ops.equal(k, 0), FIRST, 1)
        _, q, value = ops.while_loop(
            lambda number, q, value: number < count,
            iterate,
            (ops.zeros((), "int32"), q, ops.zeros_like(before)),
        )
        slow = DECAY * before
        return q, ops.where(value > slow, value, slow)
