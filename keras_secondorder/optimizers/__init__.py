"""One optimizer, one file."""

from keras_secondorder.optimizers.hessian_free import HessianFree
from keras_secondorder.optimizers.kfac import KFAC

__all__ = ["KFAC", "HessianFree"]
