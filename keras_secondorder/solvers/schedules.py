"""Hyper-parameters that may be a number or a Keras learning-rate schedule."""

import keras


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
