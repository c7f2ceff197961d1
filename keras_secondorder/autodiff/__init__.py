"""Derivatives on the backend in use; see `contract.py` for what each function means."""

import importlib

import keras

from keras_secondorder.autodiff.contract import Linearization

_backend = importlib.import_module(f"{__name__}.{keras.backend.backend()}")

vjp = _backend.vjp
jvp = _backend.jvp
linearize = _backend.linearize
hessian_product = _backend.hessian_product
eagerly = _backend.eagerly
no_grad = _backend.no_grad
spd_inverses = _backend.spd_inverses

__all__ = [
    "Linearization",
    "eagerly",
    "hessian_product",
    "jvp",
    "linearize",
    "no_grad",
    "spd_inverses",
    "vjp",
]
