"""Separable convolutions: a depthwise one, then a pointwise one."""

import keras
from keras import ops

from keras_secondorder.capture.convolution import ConvolutionWrapper
from keras_secondorder.capture.patches import channels_last
from keras_secondorder.capture.wrapper import (
    LayerWrapper,
    register_layer_wrapper,
    rows,
    with_ones,
)


@register_layer_wrapper(keras.layers.SeparableConv1D, keras.layers.SeparableConv2D)
class SeparableConvolutionWrapper(LayerWrapper):
    """`s = depthwise(inputs) @ pointwise + bias`, two affine maps.

    The gradient at the output of the first is `g @ pointwise^T`, and the input of the
    second is computed again, so that the layer itself is watched like any other.
    """

    @classmethod
    def reason_against(cls, layer):
        """Both kernels have to be trained."""
        kernels = (layer.depthwise_kernel, layer.pointwise_kernel)
        return None if all(k.trainable for k in kernels) else "a kernel is frozen"

    @property
    def variables(self):
        """`[depthwise kernel, pointwise kernel]`, and the bias."""
        bias = self.layer.bias
        trained = [bias] if bias is not None and bias.trainable else []
        return [self.layer.depthwise_kernel, self.layer.pointwise_kernel, *trained]

    @property
    def parts(self):
        """The depthwise map, then the pointwise map with the bias."""
        return [_Depthwise(self.layer), _Pointwise(self.layer)]

    def split(self, values):
        """`[[depthwise kernel], [pointwise kernel, bias]]`."""
        return [values[:1], values[1:]]

    def join(self, parts):
        """The inverse of `split`."""
        return [*parts[0], *parts[1]]


class _Depthwise(ConvolutionWrapper):
    has_bias = False
    _channels = 1

    @property
    def variables(self):
        return [self.layer.depthwise_kernel]

    @property
    def stack(self):
        return self.layer.depthwise_kernel.shape[-2]

    @property
    def _filters(self):
        return self.stack * self.layer.depth_multiplier

    def gradient_rows(self, gradient):
        pointwise = ops.convert_to_tensor(self.layer.pointwise_kernel)
        pointwise = ops.cast(pointwise, "float32")
        pointwise = ops.reshape(pointwise, (self._filters, self.layer.filters))
        g = channels_last(ops.cast(gradient, "float32"), self.layer.data_format)
        g = ops.matmul(rows(g, self.layer.filters), ops.transpose(pointwise))
        return self._grouped_filters(g)


class _Pointwise(ConvolutionWrapper):
    stack = 1
    _entries = 1

    @property
    def variables(self):
        return [self.layer.pointwise_kernel]

    @property
    def _channels(self):
        return self.layer.pointwise_kernel.shape[-2]

    def input_rows(self, inputs):
        layer = self.layer
        kernel = ops.convert_to_tensor(layer.depthwise_kernel)
        hidden = ops.depthwise_conv(
            ops.cast(inputs, "float32"),
            ops.cast(kernel, "float32"),
            strides=layer.strides,
            padding=layer.padding,
            dilation_rate=layer.dilation_rate,
            data_format=layer.data_format,
        )
        flat = rows(channels_last(hidden, layer.data_format), self._channels)
        return with_ones(flat) if self.has_bias else flat
