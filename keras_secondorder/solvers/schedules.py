"""Hyper-parameters that may be a number or a Keras learning-rate schedule."""

import math

import keras
from keras import ops


@keras.saving.register_keras_serializable(package="keras_secondorder")
class InverseRootDecay(keras.optimizers.schedules.LearningRateSchedule):
    """A value that falls as one over the root of the number of steps.

    ```
    value * min(1, sqrt(steps / n))
    ```

    Args:
        value: The value of the first steps.
        steps: Number of steps after which it falls.
    """

    def __init__(self, value: float, steps: int = 40):
        if not 0 < value < math.inf or steps < 1:
            raise ValueError(
                "`value` must be above 0, and `steps` at least 1. Received "
                f"value={value}, steps={steps}."
            )
        self.value = value
        self.steps = steps

    def __call__(self, iterations):
        """The value at step `n = iterations + 1`, a float32 scalar."""
        n = ops.cast(iterations, "float32") + 1.0
        return self.value * ops.sqrt(ops.minimum(1.0, self.steps / n))

    def get_config(self) -> dict:
        """The constructor's arguments."""
        return {"value": self.value, "steps": self.steps}


def at_step(value, iterations):
    """The value of a number or schedule after `iterations` steps.

    Args:
        value: A number or a `LearningRateSchedule`.
        iterations: Number of steps taken.

    Returns:
        A number or a scalar tensor.
    """
    if isinstance(value, keras.optimizers.schedules.LearningRateSchedule):
        return value(iterations)
    return value


def serialize(value):
    """A number, string or None as it is; any other object as its Keras config.

    Args:
        value: A constructor argument.

    Returns:
        Something that can be written as JSON.
    """
    if value is None or isinstance(value, int | float | str | bool):
        return value
    return keras.saving.serialize_keras_object(value)


def deserialize(value):
    """The inverse of `serialize`.

    Args:
        value: What `serialize` returned.

    Returns:
        The constructor argument.
    """
    if isinstance(value, dict):
        return keras.saving.deserialize_keras_object(value)
    return value
