"""Stochastic meta-descent: learning rates that are learned themselves."""

import keras
from keras import ops

from keras_secondorder import vectors
from keras_secondorder.arguments import check_at_least, check_range
from keras_secondorder.curvature.products import gauss_newton_products
from keras_secondorder.optimizers.base import StepResult
from keras_secondorder.optimizers.flat import FlatOptimizer

# A rate is at least halved and at most doubled in one step.
LEAST, MOST = 0.5, 2.0


@keras.saving.register_keras_serializable(package="keras_secondorder")
class StochasticMetaDescent(FlatOptimizer):
    """Stochastic meta-descent (Schraudolph): a learning rate for every parameter.

    ```
    p      = p * min(max(1 - meta_rate v g, 1/2), 2)
    theta -= learning_rate * p g
    v      = forgetting v - p (g + forgetting C v)
    ```

    `p` descends the loss after the step, and `v = d theta / d log p` is what the past
    steps owe to it. `C` is the Gauss-Newton matrix: one product a step.

    Args:
        learning_rate: A number or a Keras schedule, on top of the rates.
        initial_rate: `p` at the start, for all parameters.
        meta_rate: How fast the rates move, 0 for constant rates.
        forgetting: In [0, 1]: how much of the past `v` carries.
        **kwargs: Keras's shared arguments.

    Raises:
        ValueError: Arguments out of range.

    Example:
        >>> import keras, keras_secondorder as kso
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile(optimizer=kso.StochasticMetaDescent(), loss="mse")
        >>> x = keras.random.normal((64, 4), seed=0)
        >>> history = model.fit(x, x[:, :1], batch_size=64, epochs=60, verbose=0)
        >>> history.history["loss"][-1] < 1e-2 * history.history["loss"][0]
        True

    References:
        Schraudolph (2002), section 4; George (2017), thesis, section 3.4.3, equations
        3.8 to 3.10. They bound the factor of `p` from below only. Here it is bounded
        from above as well: a rate that grows a hundredfold in one step is lost.
    """

    def __init__(
        self,
        learning_rate=1.0,
        initial_rate: float = 0.1,
        meta_rate: float = 1.0,
        forgetting: float = 0.98,
        **kwargs,
    ):
        check_range("initial_rate", initial_rate, 0)
        check_at_least("meta_rate", meta_rate, 0)
        check_at_least("forgetting", forgetting, 0, 1)
        super().__init__(learning_rate, **kwargs)
        self.initial_rate = initial_rate
        self.meta_rate = meta_rate
        self.forgetting = forgetting

    def build_state(self, model):
        """Create the rates and what the past steps owe to them."""
        super().build_state(model)
        start = keras.initializers.Constant(self.initial_rate)
        shape = (self.size,)
        self.rates = self.add_variable(shape, start, self.precision, name="rates")
        self.trace = self.add_variable(shape, "zeros", self.precision, name="trace")

    def step(self, objective):
        """One step on one batch."""
        linear = objective.linearize()
        loss, g, finite = self.loss_and_gradient(objective, linear)
        C = gauss_newton_products(objective)
        p, v = vectors.values([self.rates, self.trace])
        Cv = self.flatten(C.product(self.unflatten(v)))

        p_new = p * ops.clip(1.0 - self.meta_rate * v * g, LEAST, MOST)
        v_new = self.forgetting * v - p_new * (g + self.forgetting * Cv)

        direction = p_new * g
        finite = finite & vectors.is_finite([p_new, v_new])
        vectors.assign([self.rates, self.trace], [p_new, v_new], where=finite)
        logs = {"mean_rate": ops.mean(p_new), "largest_rate": ops.max(p_new)}
        return StepResult(
            self.unflatten(direction),
            finite,
            linear.aux.state,
            logs,
            loss,
            self.unflatten(g),
        )
