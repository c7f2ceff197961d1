"""Suites of checks that anyone can run on an implementation of their own."""

from keras_secondorder.testing.layer_wrapper import check_layer_wrapper
from keras_secondorder.testing.operator import check_operator
from keras_secondorder.testing.optimizer import check_optimizer

__all__ = ["check_layer_wrapper", "check_operator", "check_optimizer"]
