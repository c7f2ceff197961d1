"""RProp: steps from the signs of the gradient alone."""

import keras
from keras import ops

from keras_secondorder.arguments import check_range
from keras_secondorder.optimizers.first_order import FirstOrderOptimizer


@keras.saving.register_keras_serializable(package="keras_secondorder")
class RProp(FirstOrderOptimizer):
    """Resilient backpropagation: each parameter has a step of its own.

    ```
    step   = step * up     where g g_before > 0
             step * down   where g g_before < 0; there g = 0, so that no step is taken
    theta -= learning_rate * sign(g) * step
    ```

    Only signs count, so it wants the full batch: those of small batches are noise. It
    needs gradients only, and works in any training loop.

    Args:
        learning_rate: A number or a Keras schedule, on top of the steps.
        initial_step: The step at the start, for all parameters.
        up: Factor where the sign of the gradient stays.
        down: Factor where it changes.
        least: Smallest step.
        most: Largest step.
        **kwargs: Keras's shared arguments.

    Raises:
        ValueError: Arguments out of range.

    Example:
        >>> import keras, keras_secondorder as kso
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile(optimizer=kso.RProp(), loss="mse")
        >>> x = keras.random.normal((64, 4), seed=0)
        >>> history = model.fit(x, x[:, :1], batch_size=64, epochs=60, verbose=0)
        >>> history.history["loss"][-1] < 1e-3
        True

    References:
        Riedmiller & Braun (1993); Igel & Huesken (2000), whose variant iRprop- this
        is: a step is not taken back where the sign changes. George (2017), thesis,
        section 3.3.3.
    """

    def __init__(
        self,
        learning_rate=1.0,
        initial_step: float = 0.01,
        up: float = 1.2,
        down: float = 0.5,
        least: float = 1e-6,
        most: float = 50.0,
        **kwargs,
    ):
        check_range("initial_step", initial_step, 0)
        check_range("up", up, 1)
        check_range("down", down, 0, 1)
        check_range("least", least, 0, most)
        super().__init__(learning_rate, **kwargs)
        self.initial_step = initial_step
        self.up = up
        self.down = down
        self.least = least
        self.most = most

    def build_state(self, model):
        """Create the steps and the gradients before."""
        self.steps = self.add_slots("step", self.initial_step)
        self.gradients = self.add_slots("gradient", 0.0)

    def update_step(self, gradient, variable, learning_rate):
        """The step of one variable."""
        index = self.place_of(variable)
        step, before = self.steps[index], self.gradients[index]
        g = ops.cast(gradient, step.dtype)
        agreement = ops.sign(g) * ops.sign(ops.convert_to_tensor(before))
        factor = ops.where(
            agreement > 0, self.up, ops.where(agreement < 0, self.down, 1.0)
        )
        new = ops.clip(ops.convert_to_tensor(step) * factor, self.least, self.most)
        g = ops.where(agreement < 0, 0.0, g)
        self.assign(step, new)
        self.assign(before, g)
        rate = ops.cast(learning_rate, variable.dtype)
        self.assign_sub(variable, rate * ops.cast(ops.sign(g) * new, variable.dtype))
