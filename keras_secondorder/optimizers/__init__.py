"""One optimizer, one file."""

from keras_secondorder.optimizers.acp import ACP
from keras_secondorder.optimizers.centered_sgd import CenteredSGD
from keras_secondorder.optimizers.hessian_free import HessianFree
from keras_secondorder.optimizers.kfac import KFAC
from keras_secondorder.optimizers.krylov_subspace_descent import KrylovSubspaceDescent
from keras_secondorder.optimizers.natural_gradient import NaturalGradient
from keras_secondorder.optimizers.natural_network import NaturalNetwork

__all__ = [
    "ACP",
    "KFAC",
    "CenteredSGD",
    "HessianFree",
    "KrylovSubspaceDescent",
    "NaturalGradient",
    "NaturalNetwork",
]
