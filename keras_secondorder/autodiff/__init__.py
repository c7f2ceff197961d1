"""Derivatives on the backend in use; see `contract.py` for what each function means."""

import importlib

import keras

from keras_secondorder.autodiff import eager
from keras_secondorder.autodiff.contract import Linearization

_backend = importlib.import_module(f"{__name__}.{keras.backend.backend()}")

vjp = _backend.vjp
linearize = _backend.linearize
linearize_gradient = _backend.linearize_gradient
eagerly = _backend.eagerly
no_grad = _backend.no_grad
random_state = _backend.random_state
set_random_state = _backend.set_random_state
full_precision = _backend.full_precision
interpolate = _backend.interpolate
inner = _backend.inner
orthonormal = _backend.orthonormal
spd_inverses = _backend.spd_inverses
symmetric_eigh = _backend.symmetric_eigh

_leaving = _backend if hasattr(_backend, "portable") else eager
compiled = _leaving.compiled
portable = _leaving.portable
stepwise = _leaving.stepwise


def hessian_product(f, primals, tangents):
    """`H v` of the scalar `f(primals)`, for one vector."""
    return linearize_gradient(f, primals)[1](tangents)


__all__ = [
    "Linearization",
    "compiled",
    "eagerly",
    "full_precision",
    "hessian_product",
    "inner",
    "interpolate",
    "linearize",
    "linearize_gradient",
    "no_grad",
    "orthonormal",
    "portable",
    "random_state",
    "set_random_state",
    "spd_inverses",
    "stepwise",
    "symmetric_eigh",
    "vjp",
]
