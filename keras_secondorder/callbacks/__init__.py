"""Callbacks that report on training."""

from keras_secondorder.callbacks.curvature_monitor import CurvatureMonitor

__all__ = ["CurvatureMonitor"]
