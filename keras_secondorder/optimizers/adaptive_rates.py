"""A learning rate for each parameter, from how gradients agree."""

import keras
from keras import ops

from keras_secondorder.arguments import (
    check_at_least,
    check_one_of,
    check_range,
)
from keras_secondorder.optimizers.first_order import FirstOrderOptimizer

RULES = ("sign", "normalized")
# The factor of the normalized rule stays within these.
LEAST, MOST = 0.5, 2.0


@keras.saving.register_keras_serializable(package="keras_secondorder")
class AdaptiveRates(FirstOrderOptimizer):
    """A learning rate for each parameter, which moves with the agreement of gradients.

    ```
    "sign":        rate = rate * up      where g g_before > 0
                   rate = rate * down    where g g_before < 0
    "normalized":  s    = decay s + (1 - decay) g^2          # s = g^2 at first
                   rate = rate * min(max(1 + meta_rate g g_before / s, 1/2), 2)
    theta -= learning_rate * rate * g
    ```

    The first is for the full batch; the second hears of sizes too, and averages noise
    out. It needs gradients only, and works in any training loop.

    Args:
        learning_rate: A number or a Keras schedule, on top of the rates.
        rule: "sign" or "normalized".
        initial_rate: The rate at the start, for all parameters.
        up: Factor where the sign of the gradient stays.
        down: Factor where it changes.
        meta_rate: How fast the normalized rule moves the rates.
        decay: Weight of the past in its mean square.
        **kwargs: Keras's shared arguments.

    Raises:
        ValueError: Arguments out of range.

    Example:
        >>> import keras, keras_secondorder as kso
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile(optimizer=kso.AdaptiveRates(), loss="mse")
        >>> x = keras.random.normal((64, 4), seed=0)
        >>> history = model.fit(x, x[:, :1], batch_size=64, epochs=60, verbose=0)
        >>> history.history["loss"][-1] < 1e-3
        True

    References:
        "sign": Silva & Almeida (1990). "normalized": Almeida, Langlois, Amaral &
        Plakhov (1998), section 3. George (2017), thesis, sections 3.3.3 and 3.3.4. The
        bounds of the normalized factor are ours.
    """

    def __init__(
        self,
        learning_rate=1.0,
        rule: str = "sign",
        initial_rate: float = 0.01,
        up: float = 1.2,
        down: float = 0.7,
        meta_rate: float = 0.1,
        decay: float = 0.9,
        **kwargs,
    ):
        check_one_of("rule", rule, RULES)
        check_range("initial_rate", initial_rate, 0)
        check_range("up", up, 1)
        check_range("down", down, 0, 1)
        check_at_least("meta_rate", meta_rate, 0)
        check_at_least("decay", decay, 0, 1 - 1e-7)
        super().__init__(learning_rate, **kwargs)
        self.rule = rule
        self.initial_rate = initial_rate
        self.up = up
        self.down = down
        self.meta_rate = meta_rate
        self.decay = decay

    def build_state(self, model):
        """Create the rates, the gradients before and their mean squares."""
        self.rates = self.add_slots("rate", self.initial_rate)
        self.gradients = self.add_slots("gradient", 0.0)
        if self.rule == "normalized":
            self.squares = self.add_slots("square", 0.0)

    def update_step(self, gradient, variable, learning_rate):
        """The step of one variable."""
        index = self.place_of(variable)
        rate = ops.convert_to_tensor(self.rates[index])
        before = ops.convert_to_tensor(self.gradients[index])
        g = ops.cast(gradient, rate.dtype)
        if self.rule == "sign":
            agreement = ops.sign(g) * ops.sign(before)
            factor = ops.where(
                agreement > 0, self.up, ops.where(agreement < 0, self.down, 1.0)
            )
        else:
            past = ops.where(self.iterations > 0, self.decay, 0.0)
            past = ops.cast(past, rate.dtype)
            s = past * ops.convert_to_tensor(self.squares[index])
            s = s + (1.0 - past) * g * g
            ratio = ops.where(s > 0, g * before / ops.where(s > 0, s, 1.0), 0.0)
            factor = ops.clip(1.0 + self.meta_rate * ratio, LEAST, MOST)
            self.assign(self.squares[index], s)
        new = rate * ops.cast(factor, rate.dtype)
        step = ops.cast(learning_rate, rate.dtype) * new * g
        self.assign(self.rates[index], new)
        self.assign(self.gradients[index], g)
        self.assign_sub(variable, ops.cast(step, variable.dtype))
