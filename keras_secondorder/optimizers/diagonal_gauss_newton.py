"""Descent scaled by a running diagonal of the curvature."""

import keras
from keras import ops

from keras_secondorder import vectors
from keras_secondorder.arguments import (
    check_at_least,
    check_one_of,
    check_range,
)
from keras_secondorder.capture import l2_curvature
from keras_secondorder.curvature.factor import running_average
from keras_secondorder.curvature.squared_gradients import (
    DIAGONALS,
    curvature_diagonal,
    dense_wrappers,
)
from keras_secondorder.optimizers.base import StepResult
from keras_secondorder.optimizers.flat import FlatOptimizer
from keras_secondorder.solvers.schedules import at_step


@keras.saving.register_keras_serializable(package="keras_secondorder")
class DiagonalGaussNewton(FlatOptimizer):
    """Descent scaled by a running diagonal of the Gauss-Newton matrix.

    ```
    d      = diag(J^T H_z J), estimated on a part of the batch
    D      = eps D + (1 - eps) d,   eps = min(1 - 1/k, decay)
    theta -= learning_rate * g / (D + eta + damping)
    ```

    `eta` is the curvature of L2 penalties. A step costs one more forward and one more
    reverse pass on the part of the batch.

    Args:
        learning_rate: A number or a Keras schedule.
        damping: A positive number or a schedule; it bounds the rate of a parameter by
            `learning_rate / damping`.
        curvature: "gauss_newton", from one reverse pass with random signs, unbiased;
            or "empirical", the squared gradients of single examples.
        decay: Largest weight of the past, in [0, 1).
        curvature_fraction: Share of the batch for `d`; at least 64 rows.
        seed: Seed of the signs.
        **kwargs: Keras's shared arguments.

    Raises:
        ValueError: Arguments out of range.

    Example:
        >>> import keras, keras_secondorder as kso
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile(optimizer=kso.DiagonalGaussNewton(), loss="mse")
        >>> scales = keras.ops.convert_to_tensor([10.0, 1.0, 0.5, 0.2])
        >>> x = keras.random.normal((64, 4), seed=0) * scales
        >>> history = model.fit(x, x[:, :1], batch_size=64, epochs=60, verbose=0)
        >>> history.history["loss"][-1] < 1e-2 * history.history["loss"][0]
        True

    References:
        Becker & LeCun (1988); LeCun, Bottou, Orr & Mueller (1998), sections 7 and 9.1,
        who propagate the diagonal back layer by layer and leave out what is beside it.
        Here nothing is left out: the estimate is that of Chapelle & Erhan (2011),
        section 4. George (2017), thesis, section 3.4.4.
    """

    def __init__(
        self,
        learning_rate=0.1,
        damping=0.1,
        curvature: str = "gauss_newton",
        decay: float = 0.95,
        curvature_fraction: float = 0.25,
        seed: int = 0,
        **kwargs,
    ):
        check_one_of("curvature", curvature, DIAGONALS)
        check_at_least("decay", decay, 0, 1 - 1e-7)
        check_range("curvature_fraction", curvature_fraction, 0, 1)
        if isinstance(damping, int | float):
            check_range("damping", damping, 0)
        super().__init__(learning_rate, **kwargs)
        self.damping = damping
        self.curvature = curvature
        self.decay = decay
        self.curvature_fraction = curvature_fraction
        self.seed = seed

    def build_state(self, model):
        """Create the running diagonal."""
        super().build_state(model)
        self.wrappers = dense_wrappers(model)
        self.diagonal = self.add_variable(
            (self.size,), "zeros", self.precision, name="diagonal"
        )

    def step(self, objective):
        """One step on one batch."""
        k = ops.cast(self.iterations, "int32")
        linear = objective.linearize()
        loss, gradient, finite = self.loss_and_gradient(objective, linear)
        part = objective.part(self.curvature_fraction)
        d = self.flatten(
            curvature_diagonal(
                part, part.linearize_network(True), self.curvature, self.seed, k
            )
        )
        finite = finite & ops.all(ops.isfinite(d))
        (before,) = vectors.values([self.diagonal])
        D = running_average(before, d, ops.cast(k + 1, self.precision), self.decay)
        vectors.assign([self.diagonal], [D], where=finite)
        eta = self.flatten(
            [
                l2_curvature(v) * ops.ones(v.shape, self.precision)
                for v in objective.variables
            ]
        )
        damping = ops.cast(at_step(self.damping, k), self.precision)
        direction = gradient / (D + eta + damping)
        logs = {"largest_curvature": ops.max(D), "mean_curvature": ops.mean(D)}
        return StepResult(
            self.unflatten(direction),
            finite,
            linear.aux.state,
            logs,
            loss,
            self.unflatten(gradient),
        )
