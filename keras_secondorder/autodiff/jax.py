"""The autodiff contract on JAX."""

import contextlib

import jax
import jax.numpy as jnp

from keras_secondorder.autodiff.contract import Linearization
from keras_secondorder.autodiff.host import lapack_inverses


def vjp(f, primals, taps=True):
    """Linearise `f(primals, tap)` for reverse passes (see `contract.py`)."""
    probes = _zero_probes(f, primals) if taps else {}

    def probed(primals, probes):
        def tap(name, tensor):
            return tensor + probes[name] if name in probes else tensor

        outputs, aux = f(primals, tap)
        return list(outputs), aux

    outputs, pull, aux = jax.vjp(probed, list(primals), probes, has_aux=True)

    def pullback_all(cotangents):
        filled = [
            jnp.zeros_like(o) if c is None else jnp.asarray(c, o.dtype)
            for o, c in zip(outputs, cotangents, strict=True)
        ]
        return pull(filled)

    return Linearization(
        outputs,
        aux,
        pullback=lambda c: pullback_all(c)[0],
        pullback_taps=lambda c: pullback_all(c)[1],
        pullback_all=pullback_all,
    )


def _zero_probes(f, primals):
    """Zeros shaped like the tapped tensors, found without computing anything."""
    specs = {}

    def discover(primals):
        def tap(name, tensor):
            specs[name] = (tensor.shape, tensor.dtype)
            return tensor

        f(primals, tap)
        return 0

    jax.eval_shape(discover, list(primals))
    return {name: jnp.zeros(shape, dtype) for name, (shape, dtype) in specs.items()}


def jvp(f, primals, tangents):
    """Outputs of `f(primals)` and their derivative along `tangents`."""
    tangents = _like(tangents, primals)
    return jax.jvp(lambda *p: list(f(list(p))), tuple(primals), tuple(tangents))


def linearize(f, primals):
    """Outputs of `f(primals)`, and a function that pushes tangents forward."""
    outputs, push = jax.linearize(lambda *p: list(f(list(p))), *primals)
    return outputs, lambda tangents: push(*_like(tangents, primals))


def _like(tangents, primals):
    """Tangents in the dtypes of the primals, which may be half precision."""
    return [jnp.asarray(t, p.dtype) for t, p in zip(tangents, primals, strict=True)]


def hessian_product(f, primals, tangents):
    """`H v` of the scalar `f(primals)`, forward over reverse."""
    gradient = jax.grad(lambda p: f(list(p)))
    return jax.jvp(gradient, (list(primals),), (_like(tangents, primals),))[1]


def eagerly(function):
    """The value of `function()`, computed at once, also while tracing."""
    with jax.ensure_compile_time_eval():
        return function()


def no_grad():
    """Nothing to switch off: JAX differentiates only what it is asked to."""
    return contextlib.nullcontext()


def spd_inverses(matrices, compiled=False):
    """Invert symmetric positive definite matrices; NaN where one is not definite.

    On one CPU device they go to LAPACK's potrf and potri on the host, all in one call:
    calls side by side would share the cores with one another. Elsewhere they stay
    where they are.
    """
    if matrices and jax.default_backend() == "cpu" and jax.device_count() == 1:
        specs = [jax.ShapeDtypeStruct(m.shape, m.dtype) for m in matrices]
        return jax.pure_callback(lapack_inverses, specs, matrices)
    return [_cholesky_inverse(m) for m in matrices]


def _cholesky_inverse(matrix):
    factor = jnp.linalg.cholesky(matrix)
    identity = jnp.eye(matrix.shape[-1], dtype=matrix.dtype)
    half = jax.scipy.linalg.solve_triangular(
        factor, jnp.broadcast_to(identity, matrix.shape), lower=True
    )
    return jnp.swapaxes(half, -1, -2) @ half
