"""Bounds on a step in units of the loss, which give way as training goes on."""

import math

import keras
from keras import ops

from keras_secondorder import vectors
from keras_secondorder.solvers.schedules import at_step

REFERENCE_STEPS = 10  # steps whose least loss stands for no knowledge of the inputs
UNBOUNDED = 1e30


class _Bound:
    """What both bounds are: two numbers, and a value on a batch."""

    def __init__(self, fraction: float, steps: int):
        if not 0 < fraction < math.inf or not steps >= 1:
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

    def __call__(self, loss, reference, iterations):
        """`c_n`, a float32 scalar."""
        size = _size(loss)
        # A loss of 0 with a gradient says nothing of its scale.
        size = ops.where(size > 0, size, UNBOUNDED)
        return self.fraction * size * self._decay(iterations)


@keras.saving.register_keras_serializable(package="keras_secondorder")
class RelativeStep(_Bound):
    """A bound on a layer's step beside its weights, which falls with the loss.

    ```
    b_n = fraction * min(1, |h_n| / h_0)^(1/4) * sqrt(min(1, steps / n))
    ```

    with `h_0` of `reference_loss`, the loss of what knows nothing of the inputs.

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

    def __call__(self, loss, reference, iterations):
        """`b_n`, a float32 scalar."""
        left = _size(loss)
        left = ops.where(left > 0, left / ops.maximum(reference, 1e-30), 1.0)
        left = ops.minimum(1.0, left)
        return self.fraction * left**0.25 * ops.sqrt(self._decay(iterations))


def reference_loss(before, loss, iterations, uninformed, *arguments):
    """The loss `h_0` that others are compared with, from the first steps.

    It is that of outputs which are the same for all inputs, or the present one where
    that is larger: about the loss at the start of a training, and far more than the
    loss of a model that is trained already. The least of some steps, as one batch may
    be odd.

    Args:
        before: What this returned in the step before, 0 at first.
        loss: The objective on the batch.
        iterations: Number of steps taken.
        uninformed: `uninformed(*arguments)` is the loss of such outputs.
        *arguments: Its arguments.

    Returns:
        A float32 scalar.
    """

    def update():
        constant = _size(uninformed(*arguments))
        constant = ops.where(ops.isfinite(constant), constant, 0.0)
        seen = ops.maximum(_size(loss), constant)
        return ops.where(before > 0, ops.minimum(before, seen), seen)

    return ops.cond(iterations < REFERENCE_STEPS, update, lambda: before + 0.0)


def _size(loss):
    return ops.absolute(vectors.cast(loss, "float32"))


def bound_at(bound, proposal):
    """The value of a bound: a number, a schedule or one of the classes above.

    Args:
        bound: The bound.
        proposal: What a step rule sees, with `loss`, `reference` and `iterations`.

    Returns:
        A float32 scalar.
    """
    if isinstance(bound, _Bound):
        return bound(proposal.loss, proposal.reference, proposal.iterations)
    return ops.cast(at_step(bound, proposal.iterations), "float32")
