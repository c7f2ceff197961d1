"""From a compiled model to a training step."""

from keras_secondorder.training.attach import attach, coverage, detach, install_hook
from keras_secondorder.training.objective import Objective

__all__ = ["Objective", "attach", "coverage", "detach", "install_hook"]
