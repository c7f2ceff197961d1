"""Callbacks for `fit`."""

from keras_secondorder.callbacks.rewhitening import Rewhitening

__all__ = ["Rewhitening"]
