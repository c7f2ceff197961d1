"""One small layer of every kind that has a wrapper, none of them square."""

from typing import NamedTuple

import numpy as np
from keras import layers

RNG = np.random.default_rng(0)


class Case(NamedTuple):
    """A layer, the shape of one example, and what is special about it.

    Attributes:
        build: Makes the layer.
        shape: Shape of one example.
        vocabulary: For integer inputs.
        exact: Whether `A (x) G` of the layer alone, with a squared loss on its
            outputs, is the Gauss-Newton matrix.
    """

    build: object
    shape: tuple
    vocabulary: int | None = None
    exact: bool = True

    def layer(self, **arguments):
        layer = self.build(**arguments)
        layer.build((None, *self.shape))
        for v in layer.trainable_variables:
            v.assign(RNG.normal(size=v.shape).astype("float32"))
        return layer

    def inputs(self, examples=3):
        if self.vocabulary:
            ids = RNG.integers(0, self.vocabulary, (examples, *self.shape))
            return ids.astype("int32")
        return RNG.normal(size=(examples, *self.shape)).astype("float32")


def _conv(cls, *args, shape, **options):
    return Case(lambda: cls(*args, **options), shape)


CASES = {
    "dense": Case(lambda: layers.Dense(3), (4,)),
    "dense, time steps": Case(lambda: layers.Dense(3, use_bias=False), (2, 3, 4)),
    "dense, lora": Case(lambda: layers.Dense(3, lora_rank=2), (4,)),
    "conv1d": _conv(layers.Conv1D, 3, 2, shape=(5, 2)),
    "conv1d, causal dilated": _conv(
        layers.Conv1D, 2, 3, padding="causal", dilation_rate=2, shape=(6, 3)
    ),
    "conv1d, same strided": _conv(
        layers.Conv1D, 2, 4, padding="same", strides=3, shape=(7, 2)
    ),
    "conv2d": _conv(layers.Conv2D, 3, (2, 3), shape=(3, 5, 2)),
    "conv2d, same strided": _conv(
        layers.Conv2D, 3, (3, 2), padding="same", strides=(2, 2), use_bias=False,
        shape=(5, 4, 2),
    ),
    "conv2d, groups": _conv(layers.Conv2D, 6, 2, groups=2, shape=(3, 3, 4)),
    "conv3d": _conv(layers.Conv3D, 2, (1, 2, 2), padding="same", shape=(2, 3, 2, 3)),
    "conv1d transposed": _conv(
        layers.Conv1DTranspose, 3, 4, strides=2, padding="same", shape=(3, 2)
    ),
    "conv2d transposed": _conv(
        layers.Conv2DTranspose, 3, (2, 3), strides=(2, 1), shape=(2, 3, 2)
    ),
    "depthwise conv1d": _conv(layers.DepthwiseConv1D, 3, depth_multiplier=2,
                              padding="same", strides=2, shape=(5, 3)),
    "depthwise conv2d": _conv(layers.DepthwiseConv2D, (2, 3), shape=(3, 4, 3)),
    "separable conv1d": _conv(layers.SeparableConv1D, 4, 3, depth_multiplier=2,
                              padding="same", shape=(4, 3)),
    "separable conv2d": _conv(layers.SeparableConv2D, 2, 2, strides=2, shape=(4, 4, 3)),
    "batch normalization": Case(lambda: layers.BatchNormalization(), (4, 3)),
    "batch normalization, axis 1": Case(
        lambda: layers.BatchNormalization(axis=1, scale=False), (4, 3)
    ),
    "layer normalization": Case(lambda: layers.LayerNormalization(), (4, 3)),
    "layer normalization, two axes": Case(
        lambda: layers.LayerNormalization(axis=[1, 3], center=False), (2, 3, 4)
    ),
    "group normalization": Case(lambda: layers.GroupNormalization(2), (3, 4)),
    "rms normalization": Case(lambda: layers.RMSNormalization(), (3, 4)),
    "embedding": Case(lambda: layers.Embedding(7, 3), (4,), 7),
    "einsum": Case(
        lambda: layers.EinsumDense("abc,cde->abde", (None, 2, 3), bias_axes="de"),
        (3, 4),
    ),
    "einsum, mixed axes": Case(
        lambda: layers.EinsumDense("aybxc,dycx->adb", (2, 3), bias_axes="d"),
        (2, 3, 2, 2),
    ),
    "einsum, groups": Case(
        lambda: layers.EinsumDense("agi,gio->aog", (3, 2), bias_axes="og"), (2, 4)
    ),
    "einsum, ellipsis": Case(
        lambda: layers.EinsumDense("...x,xy->...y", 3), (2, 4)
    ),
    "simple rnn, sequences": Case(
        lambda: layers.SimpleRNN(
            3, return_sequences=True, use_bias=False, go_backwards=True
        ), (4, 2), exact=False,
    ),
    "lstm": Case(lambda: layers.LSTM(3, return_sequences=True), (4, 2), exact=False),
    "lstm, unrolled": Case(
        lambda: layers.LSTM(2, unroll=True, use_bias=False), (3, 4), exact=False
    ),
    "gru": Case(lambda: layers.GRU(3, go_backwards=True), (4, 2), exact=False),
    "time distributed dense": Case(
        lambda: layers.TimeDistributed(layers.Dense(3)), (2, 4)
    ),
    "time distributed conv": Case(
        lambda: layers.TimeDistributed(layers.Conv1D(3, 2)), (2, 4, 2)
    ),
}  # fmt: skip
