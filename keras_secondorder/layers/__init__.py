"""Keras layers that change the geometry of what they are given."""

from keras_secondorder.layers.mean_only_batch_normalization import (
    MeanOnlyBatchNormalization,
)
from keras_secondorder.layers.whitened_convolution import (
    WhitenedConv1D,
    WhitenedConv2D,
    WhitenedConv3D,
)
from keras_secondorder.layers.whitened_dense import WhitenedDense
from keras_secondorder.layers.whitening import rewhiten, whiten

__all__ = [
    "MeanOnlyBatchNormalization",
    "WhitenedConv1D",
    "WhitenedConv2D",
    "WhitenedConv3D",
    "WhitenedDense",
    "rewhiten",
    "whiten",
]
