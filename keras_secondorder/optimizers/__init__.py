"""One optimizer, one file."""

from keras_secondorder.optimizers.hessian_free import HessianFree
from keras_secondorder.optimizers.kfac import KFAC
from keras_secondorder.optimizers.krylov_subspace_descent import KrylovSubspaceDescent
from keras_secondorder.optimizers.natural_gradient import NaturalGradient

__all__ = ["KFAC", "HessianFree", "KrylovSubspaceDescent", "NaturalGradient"]
