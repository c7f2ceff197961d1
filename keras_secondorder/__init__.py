"""Second-order optimizers for Keras 3, on TensorFlow, JAX and PyTorch.

Importing the package is all it takes: `model.compile(optimizer=KFAC())` then trains any
plain Keras model with second-order information.
"""

from keras_secondorder import (
    callbacks,
    curvature,
    diagnostics,
    initializers,
    layers,
    solvers,
    testing,
    tuning,
)
from keras_secondorder.capture import LayerWrapper, register_layer_wrapper
from keras_secondorder.layers import whiten
from keras_secondorder.optimizers import (
    ACP,
    KFAC,
    SGDQN,
    TONGA,
    AdaptiveRates,
    CenteredSGD,
    DiagonalGaussNewton,
    HessianFree,
    KrylovSubspaceDescent,
    LayerwiseDescent,
    LevenbergMarquardt,
    MatrixMomentum,
    NaturalGradient,
    NaturalNetwork,
    Newton,
    RProp,
    StochasticMetaDescent,
)
from keras_secondorder.solvers.bounds import RelativeRadius, RelativeStep
from keras_secondorder.solvers.damping import AdaptiveDamping
from keras_secondorder.solvers.step_rules import AdaptiveStep, StepRule, TrustRegionStep
from keras_secondorder.training import attach, coverage, detach, install_hook

__version__ = "0.1.0"

install_hook()

__all__ = [
    "ACP",
    "KFAC",
    "SGDQN",
    "TONGA",
    "AdaptiveRates",
    "CenteredSGD",
    "DiagonalGaussNewton",
    "HessianFree",
    "KrylovSubspaceDescent",
    "LayerwiseDescent",
    "LevenbergMarquardt",
    "MatrixMomentum",
    "NaturalGradient",
    "NaturalNetwork",
    "Newton",
    "RProp",
    "StochasticMetaDescent",
    # parts of an optimizer
    "AdaptiveDamping",
    "AdaptiveStep",
    "RelativeRadius",
    "RelativeStep",
    "StepRule",
    "TrustRegionStep",
    # the model
    "LayerWrapper",
    "attach",
    "coverage",
    "detach",
    "register_layer_wrapper",
    "whiten",
    # modules
    "callbacks",
    "curvature",
    "diagnostics",
    "initializers",
    "layers",
    "solvers",
    "testing",
    "tuning",
]
