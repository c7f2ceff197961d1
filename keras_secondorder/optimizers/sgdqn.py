"""SGD-QN: a diagonal scaling from secants."""

import keras
from keras import ops

from keras_secondorder import autodiff, vectors
from keras_secondorder.arguments import check_count, check_range
from keras_secondorder.optimizers.base import StepResult
from keras_secondorder.optimizers.flat import FlatOptimizer
from keras_secondorder.solvers.schedules import at_step


@keras.saving.register_keras_serializable(package="keras_secondorder")
class SGDQN(FlatOptimizer):
    """SGD-QN (Bordes, Bottou & Gallinari): SGD scaled by a diagonal from secants.

    ```
    s      = -learning_rate * B g(theta)
    r      = s / (g(theta + s) - g(theta)),  within [1 / (100 lambda), 1 / lambda]
    B      = B + 2 / (2 + updates) * (r - B)             # every `interval` steps
    theta += s
    ```

    Both gradients are of the same batch. Where the secant shows no positive curvature,
    `r = 1 / lambda`.

    Args:
        learning_rate: A number or a Keras schedule. The source has `1 / (t + t0)`,
            `keras.optimizers.schedules.InverseTimeDecay`.
        damping: `lambda`, a number or a schedule: the least curvature that is
            believed. `B` starts at `1 / (100 lambda)`.
        interval: Steps between two updates of `B`; each costs one more gradient.
        **kwargs: Keras's shared arguments.

    Raises:
        ValueError: Arguments out of range.

    Example:
        >>> import keras, keras_secondorder as kso
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile(optimizer=kso.SGDQN(), loss="mse")
        >>> x = keras.random.normal((64, 4), seed=0)
        >>> history = model.fit(x, x[:, :1], batch_size=64, epochs=60, verbose=0)
        >>> history.history["loss"][-1] < 1e-2 * history.history["loss"][0]
        True

    References:
        Bordes, Bottou & Gallinari (2009), figure 3; George (2017), thesis, section
        3.4.5. They start from `B = 1 / lambda` with `lambda` the weight decay of a
        convex loss, which such a secant never falls below; a network's may be
        negative, so both bounds are kept by clipping, and `B` starts at the lower one.
    """

    def __init__(self, learning_rate=0.2, damping=1.0, interval: int = 8, **kwargs):
        if isinstance(damping, int | float):
            check_range("damping", damping, 0)
        check_count("interval", interval)
        super().__init__(learning_rate, **kwargs)
        self.damping = damping
        self.interval = interval

    def build_state(self, model):
        """Create the scaling and the count of its updates."""
        super().build_state(model)
        start = 0.01 / float(at_step(self.damping, 0))
        self.scaling = self.add_variable(
            (self.size,), keras.initializers.Constant(start), self.precision, name="B"
        )
        self.updates = self.add_scalar("updates", 0.0)

    def step(self, objective):
        """One step on one batch."""
        k = ops.cast(self.iterations, "int32")
        linear = objective.linearize()
        loss, g, finite = self.loss_and_gradient(objective, linear)
        B, updates = vectors.values([self.scaling, self.updates])
        rate = ops.cast(ops.convert_to_tensor(self.learning_rate), self.precision)
        direction = B * g  # before `B` is assigned: PyTorch does so in place
        s = -rate * direction
        damping = ops.cast(at_step(self.damping, k), self.precision)

        def update():
            y = self._gradient_at(objective, s) - g
            # s / y, and 1 / lambda where y is not of the sign of s or too small.
            curved = y * s > damping * s * s
            r = ops.where(curved, s / ops.where(curved, y, 1.0), 1.0 / damping)
            r = ops.where(r < 0.01 / damping, 0.01 / damping, r)
            # A parameter that did not move has shown nothing.
            r = ops.where(ops.equal(s, 0.0), B, r)
            return B + 2.0 / (2.0 + updates) * (r - B), updates + 1.0

        due = ops.equal(k % self.interval, 0)
        new = ops.cond(due, update, lambda: (B, updates))
        finite = finite & vectors.is_finite(list(new))
        vectors.assign([self.scaling, self.updates], list(new), where=finite)
        logs = {"mean_scaling": ops.mean(new[0])}
        return StepResult(
            self.unflatten(direction),
            finite,
            linear.aux.state,
            logs,
            loss,
            self.unflatten(g),
        )

    def _gradient_at(self, objective, s):
        """The flat gradient at `theta + s`, on the same batch and the same masks."""
        there = autodiff.vjp(
            lambda parameters, tap: ([objective.value(parameters)], ()),
            objective.moved(self.unflatten(s)),
            taps=False,
        )
        return self.flatten(there.pullback([ops.ones_like(there.outputs[0])]))
