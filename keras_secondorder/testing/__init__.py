"""Contracts that anyone can run on an implementation of their own."""

from keras_secondorder.testing.layer_wrapper import check_layer_wrapper

__all__ = ["check_layer_wrapper"]
