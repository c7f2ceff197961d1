"""Second-order optimizers for Keras 3, on TensorFlow, JAX and PyTorch.

Importing the package is all it takes: `model.compile(optimizer=KFAC())` then trains any
plain Keras model with second-order information.
"""

from keras_secondorder import (
    callbacks,
    curvature,
    diagnostics,
    initializers,
    solvers,
    testing,
)
from keras_secondorder.capture import LayerWrapper, register_layer_wrapper
from keras_secondorder.optimizers import (
    KFAC,
    HessianFree,
    KrylovSubspaceDescent,
    NaturalGradient,
)
from keras_secondorder.solvers.damping import LevenbergMarquardt
from keras_secondorder.solvers.step_rules import (
    AdaptiveStep,
    RelativeRadius,
    StepRule,
    TrustRegionStep,
)
from keras_secondorder.training import attach, coverage, detach, install_hook

__version__ = "0.1.0"

install_hook()

__all__ = [
    "KFAC",
    "HessianFree",
    "KrylovSubspaceDescent",
    "NaturalGradient",
    # parts of an optimizer
    "AdaptiveStep",
    "LevenbergMarquardt",
    "RelativeRadius",
    "StepRule",
    "TrustRegionStep",
    # the model
    "LayerWrapper",
    "attach",
    "coverage",
    "detach",
    "register_layer_wrapper",
    # modules
    "callbacks",
    "curvature",
    "diagnostics",
    "initializers",
    "solvers",
    "testing",
]
