"""Convolutions, with groups and depthwise, as affine maps of patches."""

import math

import keras
from keras import ops

from keras_secondorder.capture.patches import channels_last, patches
from keras_secondorder.capture.wrapper import (
    KernelAndBias,
    LayerWrapper,
    register_layer_wrapper,
    rows,
    with_ones,
)


@register_layer_wrapper(keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D)
class ConvolutionWrapper(KernelAndBias, LayerWrapper):
    """`s = patches @ kernel + bias`: every output position is a position.

    With groups, each group of channels has its own matrix, for its own filters.

    References:
        Grosse & Martens (2016), *A Kronecker-factored approximate Fisher matrix for
        convolution layers*, section 3.
    """

    @property
    def stack(self):
        """Groups of channels."""
        return self.layer.groups

    @property
    def _entries(self):
        return math.prod(self.layer.kernel_size)

    @property
    def _channels(self):
        """Input channels of one group."""
        return self.layer.kernel.shape[-2]

    @property
    def _filters(self):
        return self.layer.filters

    @property
    def d_in(self):
        """Entries of one patch within one group, and 1 with a bias."""
        return self._entries * self._channels + self.has_bias

    @property
    def d_out(self):
        """Filters of one group."""
        return self._filters // self.stack

    def input_rows(self, inputs):
        """The patches, and 1 with a bias."""
        return self._grouped_patches(self._patches(inputs))

    def _patches(self, inputs):
        layer = self.layer
        x = channels_last(ops.cast(inputs, "float32"), layer.data_format)
        return patches(
            x, layer.kernel_size, layer.strides, layer.dilation_rate, layer.padding
        )

    def _grouped_patches(self, p):
        """`(N, T, K, C)` as rows."""
        n, t, k = ops.shape(p)[:3]
        if self.stack > 1:
            p = ops.reshape(p, (n, t, k, self.stack, self._channels))
            p = ops.transpose(p, (3, 0, 1, 2, 4))
        lead = () if self.stack == 1 else (self.stack,)
        flat = ops.reshape(p, (*lead, n, t, k * self._channels))
        return with_ones(flat) if self.has_bias else flat

    def gradient_rows(self, gradient):
        """The filters of every output position."""
        g = channels_last(gradient, self.layer.data_format)
        return self._grouped_filters(rows(g, self._filters))

    def _grouped_filters(self, g):
        """`(N, T, filters)` as rows."""
        if self.stack == 1:
            return g
        n, t = ops.shape(g)[:2]
        g = ops.reshape(g, (n, t, self.stack, self.d_out))
        return ops.transpose(g, (2, 0, 1, 3))

    def to_matrix(self, values):
        """Stack the bias under the flattened kernel, group by group."""
        entries = self._entries * self._channels
        kernel = ops.cast(values[0], "float32")
        W = ops.reshape(kernel, (entries, self.stack, self.d_out))
        if self.has_bias:
            bias = ops.cast(values[1], "float32")
            bias = ops.reshape(bias, (1, self.stack, self.d_out))
            W = ops.concatenate([W, bias], axis=0)
        return W[:, 0] if self.stack == 1 else ops.transpose(W, (1, 0, 2))

    def from_matrix(self, matrix):
        """Cut the bias off, and give the kernel its shape."""
        W = matrix[:, None] if self.stack == 1 else ops.transpose(matrix, (1, 0, 2))
        entries = self._entries * self._channels
        values = [ops.reshape(W[:entries], self.variables[0].shape)]
        if self.has_bias:
            values.append(ops.reshape(W[entries], (self._filters,)))
        return values


@register_layer_wrapper(keras.layers.DepthwiseConv1D, keras.layers.DepthwiseConv2D)
class DepthwiseConvolutionWrapper(ConvolutionWrapper):
    """A convolution whose groups are the single channels."""

    @property
    def stack(self):
        """Input channels."""
        return self.layer.kernel.shape[-2]

    _channels = 1

    @property
    def _filters(self):
        return self.stack * self.layer.depth_multiplier


@register_layer_wrapper(
    keras.layers.Conv1DTranspose,
    keras.layers.Conv2DTranspose,
    keras.layers.Conv3DTranspose,
)
class TransposedConvolutionWrapper(ConvolutionWrapper):
    """A convolution of the input with zeros between its entries.

    The patches come from the layer's own operation with a kernel of zeros and ones,
    which has its conventions for padding on every backend.
    """

    stack = 1

    @property
    def _channels(self):
        return self.layer.kernel.shape[-1]

    @property
    def _filters(self):
        return self.layer.filters

    def _patches(self, inputs):
        layer, channels = self.layer, self._channels
        count = self._entries * channels
        # kernel[k, (k', c'), c] = 1 where k = k' and c = c'
        shape = (*layer.kernel_size, count, channels)
        one_hot = ops.reshape(
            ops.transpose(
                ops.reshape(
                    ops.eye(count, dtype="float32"), (count, self._entries, channels)
                ),
                (1, 0, 2),
            ),
            shape,
        )
        p = ops.conv_transpose(
            ops.cast(inputs, "float32"),
            one_hot,
            strides=list(layer.strides),
            padding=layer.padding,
            output_padding=layer.output_padding,
            dilation_rate=layer.dilation_rate,
            data_format=layer.data_format,
        )
        p = rows(channels_last(p, layer.data_format), count)
        n, t = ops.shape(p)[:2]
        return ops.reshape(p, (n, t, self._entries, channels))

    def to_matrix(self, values):
        """The kernel has its filters before its channels."""
        return super().to_matrix([ops.swapaxes(values[0], -1, -2), *values[1:]])

    def from_matrix(self, matrix):
        """The inverse of `to_matrix`."""
        kernel = self.variables[0].shape
        W = matrix[: self._entries * self._channels]
        shape = (*kernel[:-2], kernel[-1], kernel[-2])
        values = [ops.swapaxes(ops.reshape(W, shape), -1, -2)]
        return [*values, matrix[-1]] if self.has_bias else values
