"""Callbacks and data sets for `fit`."""

from keras_secondorder.callbacks.curvature_monitor import CurvatureMonitor
from keras_secondorder.callbacks.growing_batches import growing_batches
from keras_secondorder.callbacks.rewhitening import Rewhitening

__all__ = ["CurvatureMonitor", "Rewhitening", "growing_batches"]
