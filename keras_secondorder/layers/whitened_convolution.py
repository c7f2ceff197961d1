"""Convolutions that see their patches whitened."""

import keras
from keras import ops

from keras_secondorder.capture.patches import channels_last, patches
from keras_secondorder.layers.whitened import WhitenedLayer


class _WhitenedConvolution(WhitenedLayer):
    """Base class: the convolution of any rank."""

    def __init__(self, filters, kernel_size, **kwargs):
        super().__init__(filters, kernel_size, **kwargs)
        if self.groups > 1:
            raise ValueError(
                f"{type(self).__name__} whitens all input channels together. Received "
                f"groups={self.groups}. Use the plain convolution of `keras.layers`."
            )

    def call(self, inputs):
        """The convolution with the kernel and the bias of the plain layer."""
        V, U, mean = (
            ops.convert_to_tensor(v) for v in (self.kernel, self.whitening, self.mean)
        )
        # Not `matmul`: on PyTorch, Keras gives it in float32 for float64.
        K = ops.einsum("ij,jk->ik", U, ops.reshape(V, (-1, self.filters)))
        bias = -ops.einsum("i,ij->j", mean, K)
        if self.use_bias:
            bias = bias + ops.convert_to_tensor(self.bias)
        first = self.data_format == "channels_first"
        padding = self.padding
        if padding == "causal":
            before = ((self.kernel_size[0] - 1) * self.dilation_rate[0], 0)
            sides = [before, (0, 0)]
            inputs = ops.pad(inputs, [(0, 0), *(sides[::-1] if first else sides)])
            padding = "valid"
        s = ops.conv(
            inputs,
            ops.reshape(K, V.shape),
            strides=list(self.strides),
            padding=padding,
            dilation_rate=self.dilation_rate,
            data_format=self.data_format,
        )
        # Channels come last, or before all spatial axes.
        ones = (1,) * (len(s.shape) - 2) * first
        s = s + ops.reshape(bias, (self.filters, *ones))
        return s if self.activation is None else self.activation(s)

    def input_rows(self, inputs):
        """Every patch is a row, channels running fastest, as in the kernel."""
        x = channels_last(inputs, self.data_format)
        p = patches(x, self.kernel_size, self.strides, self.dilation_rate, self.padding)
        return ops.reshape(p, (-1, p.shape[-2] * p.shape[-1]))


@keras.saving.register_keras_serializable(package="keras_secondorder")
class WhitenedConv2D(_WhitenedConvolution, keras.layers.Conv2D):
    """A 2D convolution with trained weights for whitened patches.

    ```
    s = U (p - mean) V + d,   U = (C + epsilon I)^(-1/2)
    ```

    `p` is the patch under the kernel at one position of the output, with zeros where
    it reaches into the padding, and `mean` and `C` are those of all patches: see
    `WhitenedDense` for the rest. Positions and channels are whitened together, as
    `NaturalNetwork` and K-FAC have it; whitening the channels alone would leave
    neighbouring pixels, which are nearly equal, as they are. Padding is part of a
    patch, so the function at the borders is that of the plain layer, too.

    No patch is made in `call`: it is a convolution with `U V` for kernel and
    `d - mean U V` for bias.

    Args:
        filters: Number of outputs.
        kernel_size: As in Keras.
        **kwargs: Those of the layer in `keras.layers`.

    Raises:
        ValueError: `groups` is above 1.

    References:
        Desjardins, Simonyan, Pascanu & Kavukcuoglu (2015), section 3, for the layer;
        Grosse & Martens (2016), section 3, for the patches as its inputs.
    """


@keras.saving.register_keras_serializable(package="keras_secondorder")
class WhitenedConv1D(_WhitenedConvolution, keras.layers.Conv1D):
    """A 1D convolution with whitened patches, as `WhitenedConv2D`."""


@keras.saving.register_keras_serializable(package="keras_secondorder")
class WhitenedConv3D(_WhitenedConvolution, keras.layers.Conv3D):
    """A 3D convolution with whitened patches, as `WhitenedConv2D`."""
