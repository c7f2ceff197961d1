"""Gradient descent from the last layer to the first, by updated backpropagation."""

import keras
from keras import ops

from keras_secondorder import autodiff, vectors
from keras_secondorder.arguments import check_one_of
from keras_secondorder.capture import places_of, plan_blocks
from keras_secondorder.curvature.products import hessian_products
from keras_secondorder.optimizers.base import SecondOrderOptimizer, StepResult

GRADIENTS = ("plain", "updated", "true")


@keras.saving.register_keras_serializable(package="keras_secondorder")
class LayerwiseDescent(SecondOrderOptimizer):
    """Gradient descent, layer by layer, in which a layer knows of those that moved.

    ```
    for the layers l = L, ..., 1:
        g'_l    = g_l + sum_{m > l} (d g_l / d W_m) delta_m       # gradient="updated"
        delta_l = -learning_rate * g'_l
    W_l += delta_l                                                # all l
    ```

    Backpropagation gives every layer the gradient at a point that the layers above it
    are about to leave. The sum is what that changes, to first order: a product with
    the Hessian of the loss for each layer that has moved. Experimental: a step costs as
    many products as there are layers, less one.

    Args:
        learning_rate: A number or a Keras schedule.
        gradient: "updated"; "plain" for the old gradient, which is gradient descent; or
            "true" for the gradient at the moved point, for as many reverse passes as
            there are layers.
        **kwargs: Keras's shared arguments (`weight_decay`, `use_ema`, ...); what they
            do to a step is not part of `delta`.

    Raises:
        ValueError: A number outside its range, or another `gradient`.

    Example:
        >>> import keras, keras_secondorder as kso
        >>> layers = [keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)]
        >>> model = keras.Sequential([keras.Input((4,)), *layers])
        >>> model.compile(optimizer=kso.LayerwiseDescent(0.1), loss="mse")
        >>> x = keras.random.normal((64, 4), seed=0)
        >>> history = model.fit(x, keras.ops.tanh(x[:, :1]), epochs=50, verbose=0)
        >>> history.history["loss"][-1] < 0.1
        True

    References:
        George (2017), thesis, chapter 5, eq. 5.2. The derivative is exact here, through
        all layers above; layers are taken in the order in which the model has them.
    """

    #: No layer is watched during a step.
    wrappers: tuple = ()

    def __init__(self, learning_rate=0.01, gradient: str = "updated", **kwargs):
        check_one_of("gradient", gradient, GRADIENTS)
        super().__init__(learning_rate, **kwargs)
        self.gradient = gradient

    def build_state(self, model):
        """Sort the variables by layer; there is no other state."""
        self.precision = vectors.precision_of(model.trainable_variables)
        self._layers = {}  # name -> places of its variables
        plan = plan_blocks(model, "gradient")
        for block, places in zip(plan, places_of(plan, model), strict=True):
            self._layers.setdefault(block.layer_name, []).extend(places)

    def step(self, objective) -> StepResult:
        """One step on one batch."""
        linear = objective.linearize()
        gradient, _ = objective.gradient(linear)
        direction = list(gradient)
        if self.gradient != "plain":
            rate = ops.cast(self.learning_rate, self.precision)
            delta = [ops.zeros_like(g) for g in gradient]
            change = self._changes(objective, gradient)
            for number, places in enumerate(reversed(self._layers.values())):
                changed = change(delta) if number else delta
                for i in places:
                    direction[i] = gradient[i] + changed[i]
                    delta[i] = -rate * direction[i]
        loss, state = linear.outputs[0], linear.aux.state
        finite = ops.isfinite(loss) & vectors.is_finite(direction)
        return StepResult(direction, finite, state, {}, loss, gradient)

    def _changes(self, objective, gradient):
        """A function from the move of some layers to the change of the gradient."""
        if self.gradient == "updated":
            return hessian_products(objective).product

        def change(delta):
            there = objective.moved(delta)
            after, _ = autodiff.linearize_gradient(objective.value, there)
            return [
                ops.cast(a, g.dtype) - g for a, g in zip(after, gradient, strict=True)
            ]

        return change
