"""Keras layers that change the geometry of what they are given."""

from keras_secondorder.layers.mean_only_batch_normalization import (
    MeanOnlyBatchNormalization,
)
from keras_secondorder.layers.whitened_dense import WhitenedDense, rewhiten, whiten

__all__ = ["MeanOnlyBatchNormalization", "WhitenedDense", "rewhiten", "whiten"]
