"""Scales and shifts of normalization layers."""

import contextlib
import math

import keras
from keras import ops

from keras_secondorder.capture.wrapper import (
    LayerWrapper,
    register_layer_wrapper,
    replaced,
)


@register_layer_wrapper(
    keras.layers.BatchNormalization, keras.layers.GroupNormalization
)
class NormalizationWrapper(LayerWrapper):
    """`outputs = gamma * normalized + beta`, unit by unit.

    While the layer is watched it normalizes only, and scale and shift are applied
    after it: the input that the block needs is the normalized one, which cannot be had
    from the outputs where `gamma` is 0.
    """

    kind = "unitwise"

    #: Attributes under which the layer normalizes only.
    plain = {"scale": False, "center": False}

    @property
    def _scale(self):
        return self.layer.gamma

    @property
    def _shift(self):
        return self.layer.beta

    @property
    def variables(self):
        """Those of `[gamma, beta]` that exist and are trained."""
        both = (self._scale, self._shift)
        return [v for v in both if v is not None and v.trainable]

    @property
    def stack(self):
        """Units: features, channels."""
        return math.prod(self.variables[0].shape)

    def _axes(self, rank):
        axes = self.layer.axis
        axes = axes if isinstance(axes, list | tuple) else [axes]
        return [axis % rank for axis in axes]

    @contextlib.contextmanager
    def record(self, on_input, on_preactivation):
        """Watch the normalized input, and the output."""
        layer, forward = self.layer, self.layer.call

        def call(inputs, *args, **kwargs):
            with replaced(layer, **self.plain):
                normalized = forward(inputs, *args, **kwargs)
            on_input(normalized)
            outputs = ops.cast(normalized, "float32")
            rank, axes = len(inputs.shape), self._axes(len(inputs.shape))
            shape = [inputs.shape[i] if i in axes else 1 for i in range(rank)]
            if self._scale is not None:
                scale = ops.cast(self._scale, "float32")
                outputs = outputs * ops.reshape(scale, shape)
            if self._shift is not None:
                shift = ops.cast(self._shift, "float32")
                outputs = outputs + ops.reshape(shift, shape)
            return on_preactivation(ops.cast(outputs, layer.compute_dtype))

        with replaced(layer, call=call):
            yield

    def parameter_gradients(self, normalized, gradient):
        """The gradients of the variables at every position.

        Args:
            normalized: What was recorded.
            gradient: The gradient at the output, of the same shape.

        Returns:
            Shape `(variables, N, T, units)`, float32.
        """
        of = {id(self._scale): gradient * ops.cast(normalized, gradient.dtype)}
        of[id(self._shift)] = gradient
        return ops.stack([self._by_unit(of[id(v)]) for v in self.variables])

    def _by_unit(self, tensor):
        axes = self._axes(len(tensor.shape))
        last = [i - len(axes) for i in range(len(axes))]
        tensor = ops.moveaxis(ops.cast(tensor, "float32"), axes, last)
        return ops.reshape(tensor, (ops.shape(tensor)[0], -1, self.stack))


@register_layer_wrapper(keras.layers.LayerNormalization)
class LayerNormalizationWrapper(NormalizationWrapper):
    """The same, for a layer that asks for its variables and not for flags."""

    plain = {"gamma": None, "beta": None}

    @classmethod
    def reason_against(cls, layer):
        """The deprecated scaling by the variance has another form."""
        return "rms_scaling is set" if layer.rms_scaling else None


@register_layer_wrapper(keras.layers.RMSNormalization)
class RMSNormalizationWrapper(NormalizationWrapper):
    """A scale without a shift."""

    plain = {"scale": None}
    _shift = None

    @property
    def _scale(self):
        return self.layer.scale
