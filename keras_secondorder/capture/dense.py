"""Dense layers, and what low-rank adaptation makes of them."""

import keras
from keras import ops

from keras_secondorder.capture.wrapper import (
    KernelAndBias,
    LayerWrapper,
    register_layer_wrapper,
    rows,
    stacked,
    unstacked,
    with_ones,
)


@register_layer_wrapper(keras.layers.Dense)
class DenseWrapper(KernelAndBias, LayerWrapper):
    """`s = inputs @ kernel + bias` on inputs `(N, ..., d)`; the middle axes share."""

    @classmethod
    def of(cls, layer):
        """With LoRA, the wrapper of the two thin kernels."""
        return LoraDenseWrapper(layer) if layer.lora_enabled else cls(layer)

    @classmethod
    def reason_against(cls, layer):
        """As for every kernel, but LoRA has a wrapper of its own."""
        if layer.lora_enabled and layer.quantization_mode is None:
            return None
        return super().reason_against(layer)

    @property
    def d_in(self):
        """Input features, and 1 with a bias."""
        return self.layer.kernel.shape[0] + self.has_bias

    @property
    def d_out(self):
        """Units."""
        return self.layer.kernel.shape[1]

    def input_rows(self, inputs):
        """Flatten the axes between the first and the last."""
        flat = rows(inputs, self.layer.kernel.shape[0])
        return with_ones(flat) if self.has_bias else flat

    def gradient_rows(self, gradient):
        """Flatten the axes between the first and the last."""
        return rows(gradient, self.d_out)

    def to_matrix(self, values):
        """Stack the bias under the kernel."""
        return stacked(values)

    def from_matrix(self, matrix):
        """Cut the last row off as the bias."""
        return unstacked(matrix, self.has_bias)

    def from_product(self, a, g):
        """Cut the last column of the thin `a` off, not a row of the product."""
        kernel_and_bias = unstacked(ops.transpose(a), self.has_bias)
        return [ops.matmul(part, g) for part in kernel_and_bias]


class LoraDenseWrapper(DenseWrapper):
    """`s = inputs @ kernel + c (inputs @ a) @ b + bias` with a frozen kernel.

    Both thin kernels are affine maps: `a` of the inputs, with the gradient `c g b^T`
    at its output; `b`, with the bias, of `c inputs @ a`, with the gradient `g`.
    """

    @property
    def variables(self):
        """`[a, b]` or `[a, b, bias]`."""
        bias = [self.layer.bias] if self.has_bias else []
        return [self.layer.lora_kernel_a, self.layer.lora_kernel_b, *bias]

    @property
    def parts(self):
        """The map by `a`, then the map by `b` and the bias."""
        return [_LoraDown(self.layer), _LoraUp(self.layer)]

    def split(self, values):
        """`[[a], [b, bias]]`."""
        return [values[:1], values[1:]]

    def join(self, parts):
        """`[a, b, bias]`."""
        return [*parts[0], *parts[1]]


class _LoraPart(DenseWrapper):
    """One of the two thin kernels, in the place of the kernel."""

    @property
    def d_in(self):
        return self.variables[0].shape[0] + self.has_bias

    @property
    def d_out(self):
        return self.variables[0].shape[1]

    def _thin(self, name):
        value = ops.convert_to_tensor(getattr(self.layer, f"lora_kernel_{name}"))
        return ops.cast(value, "float32")

    @property
    def _scale(self):
        return self.layer.lora_alpha / self.layer.lora_rank


class _LoraDown(_LoraPart):
    has_bias = False

    @property
    def variables(self):
        return [self.layer.lora_kernel_a]

    def input_rows(self, inputs):
        return rows(inputs, self.d_in)

    def gradient_rows(self, gradient):
        b = self._thin("b")
        return self._scale * ops.matmul(rows(gradient, b.shape[1]), ops.transpose(b))


class _LoraUp(_LoraPart):
    @property
    def variables(self):
        return [self.layer.lora_kernel_b]

    def input_rows(self, inputs):
        a = self._thin("a")
        thin = self._scale * ops.matmul(rows(inputs, a.shape[0]), a)
        return with_ones(thin) if self.has_bias else thin
