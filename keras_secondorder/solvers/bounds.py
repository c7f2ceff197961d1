"""Bounds on a step in units of the loss, which give way as training goes on."""

import math

import keras
from keras import ops

from keras_secondorder.solvers.schedules import at_step


class _Bound:
    """What both bounds are: two numbers, and a value on a batch."""

    def __init__(self, fraction: float, steps: int):
        if not 0 < fraction < math.inf or steps < 1:
            raise ValueError(
                "`fraction` must be above 0, and `steps` at least 1. Received "
                f"fraction={fraction}, steps={steps}."
            )
        self.fraction = fraction
        self.steps = steps

    def _decay(self, iterations):
        n = ops.cast(iterations, "float32") + 1.0
        return ops.minimum(1.0, self.steps / n)

    def get_config(self) -> dict:
        """The constructor's arguments."""
        return {"fraction": self.fraction, "steps": self.steps}

    @classmethod
    def from_config(cls, config: dict):
        """Rebuild the object from its arguments."""
        return cls(**config)


@keras.saving.register_keras_serializable(package="keras_secondorder")
class RelativeRadius(_Bound):
    """A trust region in units of the loss, which shrinks as training goes on.

    ```
    c_n = fraction * |h_n| * min(1, steps / n)
    ```

    A step may change the predictions by a share of the loss that is left, so the same
    numbers serve losses of any scale. The decay averages the noise of the batches out,
    as the learning rate of a stochastic method has to.

    Args:
        fraction: Share of the loss of the batch.
        steps: Number of steps after which the radius falls as `1 / n`.
    """

    def __init__(self, fraction: float = 0.01, steps: int = 60):
        super().__init__(fraction, steps)

    def __call__(self, loss, first_loss, iterations):
        """`c_n`, a float32 scalar."""
        size = ops.absolute(ops.cast(loss, "float32"))
        return self.fraction * size * self._decay(iterations)


@keras.saving.register_keras_serializable(package="keras_secondorder")
class RelativeStep(_Bound):
    """A bound on a layer's step beside its weights, which falls with the loss.

    ```
    b_n = fraction * min(1, |h_n / h_1|)^(1/4) * sqrt(min(1, steps / n))
    ```

    Where the loss is a square of the way that is left, its square root makes steps a
    share of that way. The fourth root is from measurements. So steps stay long while
    there is something to gain, and shorten on what is learned already.

    Args:
        fraction: Share of the weights at first.
        steps: Number of steps after which the bound falls as `1 / sqrt(n)` too, which
            averages the noise of the batches out.
    """

    def __init__(self, fraction: float = 0.01, steps: int = 100):
        super().__init__(fraction, steps)

    def __call__(self, loss, first_loss, iterations):
        """`b_n`, a float32 scalar."""
        left = ops.absolute(ops.cast(loss, "float32"))
        left = ops.minimum(1.0, left / ops.maximum(first_loss, 1e-30))
        return self.fraction * left**0.25 * ops.sqrt(self._decay(iterations))


def bound_at(bound, proposal):
    """The value of a bound: a number, a schedule or one of the classes above.

    Args:
        bound: The bound.
        proposal: What a step rule sees, with `loss`, `first_loss` and `iterations`.

    Returns:
        A float32 scalar.
    """
    if isinstance(bound, _Bound):
        return bound(proposal.loss, proposal.first_loss, proposal.iterations)
    return ops.cast(at_step(bound, proposal.iterations), "float32")
