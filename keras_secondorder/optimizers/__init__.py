"""One optimizer, one file."""

from keras_secondorder.optimizers.kfac import KFAC

__all__ = ["KFAC"]
