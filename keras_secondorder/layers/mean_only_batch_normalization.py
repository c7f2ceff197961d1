"""Batch normalisation that takes out the mean and leaves the scale."""

import numbers

import keras
from keras import ops

from keras_secondorder.arguments import check_at_least


@keras.saving.register_keras_serializable(package="keras_secondorder")
class MeanOnlyBatchNormalization(keras.layers.Layer):
    """Subtract the mean of the batch from every feature, and add a trained shift.

    ```
    training:    y = x - mean_batch(x) + beta
                 moving_mean = momentum * moving_mean + (1 - momentum) * mean_batch(x)
    inference:   y = x - moving_mean + beta
    ```

    A frozen layer is in inference mode, as in Keras.

    Args:
        axis: The axis of the features; the mean is over all others.
        momentum: Weight of the past in the moving mean, in [0, 1].
        **kwargs: Those of every Keras layer.

    Raises:
        ValueError: `momentum` is outside its range; the input has no such axis, or one
            of unknown size.

    Example:
        >>> import numpy as np
        >>> from keras_secondorder.layers import MeanOnlyBatchNormalization
        >>> layer = MeanOnlyBatchNormalization()
        >>> y = layer(np.array([[1.0, 5.0], [3.0, 9.0]]), training=True)
        >>> np.array(y).tolist()
        [[-1.0, -2.0], [1.0, 2.0]]

    References:
        Salimans & Kingma (2016), section 4; George (2017), thesis, section 6.3, where
        it is the baseline of figure 6.1.
    """

    def __init__(self, axis: int = -1, momentum: float = 0.99, **kwargs):
        check_at_least("momentum", momentum, 0, 1)
        super().__init__(**kwargs)
        self.axis = axis
        self.momentum = momentum
        self.supports_masking = True

    def build(self, input_shape):
        """Create the shift and the moving mean."""
        rank = len(input_shape)
        there = isinstance(self.axis, numbers.Integral) and -rank <= self.axis < rank
        size = input_shape[self.axis] if there else None
        if size is None:
            raise ValueError(
                "`axis` must be one axis of the input and have a known size. Received "
                f"the input shape {input_shape} with axis={self.axis}. Choose another."
            )
        self.beta = self.add_weight(shape=(size,), initializer="zeros", name="beta")
        self.moving_mean = self.add_weight(
            shape=(size,), initializer="zeros", trainable=False, name="moving_mean"
        )

    def call(self, inputs, training=False, mask=None):
        """The centred inputs; masked positions do not count in the mean."""
        rank = len(inputs.shape)
        axis = self.axis % rank
        shape = [inputs.shape[axis] if i == axis else 1 for i in range(rank)]
        mean = ops.convert_to_tensor(self.moving_mean)
        if training and self.trainable:
            x = ops.cast(inputs, self.variable_dtype)
            mean = _mean(x, [i for i in range(rank) if i != axis], mask)
            past = self.momentum * ops.convert_to_tensor(self.moving_mean)
            self.moving_mean.assign(past + (1 - self.momentum) * mean)
        shift = ops.cast(ops.convert_to_tensor(self.beta) - mean, self.compute_dtype)
        return ops.cast(inputs, self.compute_dtype) + ops.reshape(shift, shape)

    def compute_output_shape(self, input_shape):
        """That of the input."""
        return input_shape

    def get_config(self):
        """The constructor's arguments."""
        config = super().get_config()
        return {**config, "axis": self.axis, "momentum": self.momentum}


def _mean(x, axes, mask):
    if mask is None:
        return ops.mean(x, axis=axes)
    weight = ops.cast(mask, x.dtype)
    weight = ops.reshape(weight, (*ops.shape(weight), *[1] * (len(x.shape) - 2)))
    weight = ops.broadcast_to(weight, ops.shape(x))
    x = ops.where(weight > 0, x, ops.zeros_like(x))
    return ops.sum(x, axis=axes) / ops.maximum(ops.sum(weight, axis=axes), 1)
