"""Dense layers, also under TimeDistributed."""

import contextlib

import keras
from keras import ops

from keras_secondorder.capture.wrapper import (
    LayerWrapper,
    register_layer_wrapper,
    replaced,
    rows,
    with_ones,
)


@register_layer_wrapper(keras.layers.Dense)
class DenseWrapper(LayerWrapper):
    """`s = inputs @ kernel + bias` on inputs `(N, ..., d)`; the middle axes share."""

    @classmethod
    def reason_against(cls, layer):
        """A kernel that is not the variable itself has another gradient."""
        if getattr(layer, "lora_enabled", False):
            return "LoRA is enabled"
        if getattr(layer, "quantization_mode", None) is not None:
            return f"quantized to {layer.quantization_mode}"
        if not layer.kernel.trainable:
            return "its kernel is frozen"
        return None

    @property
    def _has_bias(self):
        return self.layer.bias is not None and self.layer.bias.trainable

    @property
    def variables(self):
        """`[kernel]` or `[kernel, bias]`."""
        bias = [self.layer.bias] if self._has_bias else []
        return [self.layer.kernel, *bias]

    @property
    def d_in(self):
        """Input features, and 1 with a bias."""
        return self.layer.kernel.shape[0] + self._has_bias

    @property
    def d_out(self):
        """Units."""
        return self.layer.kernel.shape[1]

    @contextlib.contextmanager
    def record(self, on_input, on_preactivation):
        """Watch `call` for the input and `activation` for what goes into it."""
        layer, forward, activation = self.layer, self.layer.call, self.layer.activation

        def tapped(preactivation):
            preactivation = on_preactivation(preactivation)
            return preactivation if activation is None else activation(preactivation)

        def call(inputs, *args, **kwargs):
            on_input(inputs)
            return forward(inputs, *args, **kwargs)

        with replaced(layer, call=call, activation=tapped):
            yield

    def input_rows(self, inputs):
        """Flatten the axes between the first and the last."""
        flat = rows(inputs, self.layer.kernel.shape[0])
        return with_ones(flat) if self._has_bias else flat

    def gradient_rows(self, gradient):
        """Flatten the axes between the first and the last."""
        return rows(gradient, self.d_out)

    def to_matrix(self, values):
        """Stack the bias under the kernel."""
        kernel = ops.cast(values[0], "float32")
        if not self._has_bias:
            return kernel
        return ops.concatenate([kernel, ops.cast(values[1], "float32")[None]], axis=0)

    def from_matrix(self, matrix):
        """Cut the last row off as the bias."""
        return [matrix[:-1], matrix[-1]] if self._has_bias else [matrix]


class TimeDistributedDenseWrapper(DenseWrapper):
    """Dense under TimeDistributed: the same layer, applied to all steps at once.

    TimeDistributed calls its layer once for every step, inside a loop or a vectorised
    map. A Dense layer treats the steps alike, so while it is watched it is given the
    whole sequence, which is the same computation.

    Args:
        layer: The `TimeDistributed` layer.
    """

    def __init__(self, layer):
        super().__init__(layer.layer)
        self._outer = layer

    @contextlib.contextmanager
    def record(self, on_input, on_preactivation):
        """Also hand the whole sequence to the inner layer."""
        with super().record(on_input, on_preactivation):

            def call(inputs, training=None, mask=None):
                return self.layer.call(inputs)

            with replaced(self._outer, call=call):
                yield
