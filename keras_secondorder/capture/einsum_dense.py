"""EinsumDense, and with it the projections of attention layers."""

import math

import keras
from keras import ops

from keras_secondorder.capture.wrapper import (
    KernelAndBias,
    LayerWrapper,
    register_layer_wrapper,
    with_ones,
)

_SPARE_LETTERS = "ZYXWVUTSRQPONMLKJIHGFEDCBA"


class Axes:
    """The letters of an equation such as `abc,cde->abde`, by what they do.

    Attributes:
        inputs, kernel, outputs: The letters of the three arrays.
        contracted: In inputs and kernel: what is summed over, `d_in`.
        free: In kernel and outputs: `d_out`.
        groups: In all three: each has its own matrix.
        positions: In inputs and outputs, the examples first: they share the kernel.
        reason: Why the equation is none of these, or an empty string.
    """

    def __init__(self, equation: str, rank: int):
        left, self.outputs = equation.replace(" ", "").split("->")
        self.inputs, self.kernel = left.split(",")
        if "..." in self.inputs:
            used = set(equation)
            spare = [c for c in _SPARE_LETTERS if c not in used]
            more = "".join(spare[: rank - len(self.inputs) + 3])
            self.inputs = self.inputs.replace("...", more)
            self.outputs = self.outputs.replace("...", more)
        i, k, o = set(self.inputs), set(self.kernel), set(self.outputs)
        self.contracted = [c for c in self.kernel if c in i and c not in o]
        self.free = [c for c in self.kernel if c in o and c not in i]
        self.groups = [c for c in self.kernel if c in o and c in i]
        self.positions = [c for c in self.inputs if c in o and c not in k]
        self.reason = ""
        repeated = any(
            len(set(t)) < len(t) for t in (self.inputs, self.kernel, self.outputs)
        )
        alone = (i - k - o) | (k - i - o) | (o - i - k)
        if repeated or alone:
            self.reason = f"the equation {equation} is no plain product"
        elif self.inputs[0] not in self.positions:
            self.reason = "its first axis is not one of examples"


@register_layer_wrapper(keras.layers.EinsumDense)
class EinsumDenseWrapper(KernelAndBias, LayerWrapper):
    """`s = einsum(equation, inputs, kernel) + bias`, with any number of shared axes."""

    def __init__(self, layer):
        super().__init__(layer)
        self._axes = Axes(layer.equation, layer.input_spec.ndim)
        axes = self._axes
        size = dict(zip(axes.kernel, layer.kernel.shape, strict=True))
        self._sizes = {
            name: [size[c] for c in getattr(axes, name)]
            for name in ("contracted", "free", "groups")
        }
        self.stack = math.prod(self._sizes["groups"])

    @classmethod
    def reason_against(cls, layer):
        """As for every kernel; and the equation has to be a product of rows."""
        reason = super().reason_against(layer)
        return reason or Axes(layer.equation, layer.input_spec.ndim).reason or None

    @property
    def has_bias(self):
        """Whether there is a bias, with an entry for each output of the matrix."""
        axes, bias_axes = self._axes, self.layer.bias_axes
        matching = bias_axes is not None and (
            set(bias_axes) == {*axes.free, *axes.groups}
        )
        return matching and self.layer.bias.trainable

    @property
    def left_out(self):
        """A bias over other axes than the outputs of the matrix."""
        return f"a bias over the axes '{self.layer.bias_axes}'"

    @property
    def d_in(self):
        """Contracted entries, and 1 with a bias."""
        return math.prod(self._sizes["contracted"]) + self.has_bias

    @property
    def d_out(self):
        """Free entries."""
        return math.prod(self._sizes["free"])

    def _rows(self, tensor, letters, features, width):
        """`(groups, N, T, width)`, or `(N, T, width)` without groups."""
        axes = self._axes
        order = [letters.index(c) for c in [*axes.groups, *axes.positions, *features]]
        tensor = ops.transpose(ops.cast(tensor, "float32"), order)
        shape = ops.shape(tensor)
        count = len(axes.groups)
        positions = 1
        for side in shape[count + 1 : count + len(axes.positions)]:
            positions = positions * side
        lead = () if self.stack == 1 else (self.stack,)
        return ops.reshape(tensor, (*lead, shape[count], positions, width))

    def input_rows(self, inputs):
        """The contracted entries of every position, and 1 with a bias."""
        axes, width = self._axes, math.prod(self._sizes["contracted"])
        flat = self._rows(inputs, axes.inputs, axes.contracted, width)
        return with_ones(flat) if self.has_bias else flat

    def gradient_rows(self, gradient):
        """The free entries of every position."""
        axes = self._axes
        return self._rows(gradient, axes.outputs, axes.free, self.d_out)

    def _kernel_order(self):
        axes = self._axes
        letters = [*axes.groups, *axes.contracted, *axes.free]
        return [axes.kernel.index(c) for c in letters]

    def _bias_letters(self):
        """The axes of the bias in the order in which it has them."""
        return [c for c in self._axes.outputs if c in self.layer.bias_axes]

    def to_matrix(self, values):
        """Stack the bias under the kernel, group by group."""
        d_in = math.prod(self._sizes["contracted"])
        W = ops.transpose(ops.cast(values[0], "float32"), self._kernel_order())
        W = ops.reshape(W, (self.stack, d_in, self.d_out))
        if self.has_bias:
            letters = self._bias_letters()
            bias = ops.reshape(ops.cast(values[1], "float32"), self._bias_shape())
            order = [letters.index(c) for c in [*self._axes.groups, *self._axes.free]]
            bias = ops.transpose(bias, order)
            bias = ops.reshape(bias, (self.stack, 1, self.d_out))
            W = ops.concatenate([W, bias], axis=1)
        return W[0] if self.stack == 1 else W

    def from_matrix(self, matrix):
        """The inverse of `to_matrix`."""
        axes, sizes = self._axes, self._sizes
        d_in = math.prod(sizes["contracted"])
        W = ops.reshape(matrix, (self.stack, self.d_in, self.d_out))
        kernel = ops.reshape(
            W[:, :d_in], (*sizes["groups"], *sizes["contracted"], *sizes["free"])
        )
        values = [ops.transpose(kernel, _inverse(self._kernel_order()))]
        if self.has_bias:
            letters = self._bias_letters()
            bias = ops.reshape(W[:, d_in], (*sizes["groups"], *sizes["free"]))
            order = [letters.index(c) for c in [*axes.groups, *axes.free]]
            bias = ops.transpose(bias, _inverse(order))
            values.append(ops.reshape(bias, self.layer.bias.shape))
        return values

    def _bias_shape(self):
        size = dict(zip(self._axes.kernel, self.layer.kernel.shape, strict=True))
        return [size[c] for c in self._bias_letters()]


def _inverse(order: list) -> list:
    """The permutation that undoes another."""
    return sorted(range(len(order)), key=order.__getitem__)
