"""From a compiled model to a training step."""

from keras_secondorder.training.attach import attach, coverage, detach, install_hook

__all__ = ["attach", "coverage", "detach", "install_hook"]
