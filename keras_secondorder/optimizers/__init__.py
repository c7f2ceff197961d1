"""One optimizer, one file."""

from keras_secondorder.optimizers.acp import ACP
from keras_secondorder.optimizers.adaptive_rates import AdaptiveRates
from keras_secondorder.optimizers.centered_sgd import CenteredSGD
from keras_secondorder.optimizers.diagonal_gauss_newton import DiagonalGaussNewton
from keras_secondorder.optimizers.hessian_free import HessianFree
from keras_secondorder.optimizers.kfac import KFAC
from keras_secondorder.optimizers.krylov_subspace_descent import KrylovSubspaceDescent
from keras_secondorder.optimizers.layerwise_descent import LayerwiseDescent
from keras_secondorder.optimizers.levenberg_marquardt import LevenbergMarquardt
from keras_secondorder.optimizers.matrix_momentum import MatrixMomentum
from keras_secondorder.optimizers.natural_gradient import NaturalGradient
from keras_secondorder.optimizers.natural_network import NaturalNetwork
from keras_secondorder.optimizers.newton import Newton
from keras_secondorder.optimizers.rprop import RProp
from keras_secondorder.optimizers.sgdqn import SGDQN
from keras_secondorder.optimizers.stochastic_meta_descent import StochasticMetaDescent
from keras_secondorder.optimizers.tonga import TONGA

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
]
