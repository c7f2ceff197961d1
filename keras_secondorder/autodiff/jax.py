"""The autodiff contract on JAX."""

import contextlib
import os

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.tree_util import Partial

from keras_secondorder.autodiff.contract import Linearization
from keras_secondorder.autodiff.host import lapack_inverses, lapack_orthonormal


def vjp(f, primals, taps=True):
    """Linearise `f(primals, tap)` for reverse passes (see `contract.py`)."""
    primals, probes = list(primals), _zero_probes(f, primals) if taps else {}
    outputs, pull, aux = jax.vjp(_probed(f), primals, probes, has_aux=True)
    return _linearization(outputs, aux, pull)


def linearize(f, primals, taps=False):
    """Linearise `f(primals, tap)` for both directions (see `contract.py`)."""
    primals, probes = list(primals), _zero_probes(f, primals) if taps else {}
    outputs, forward, aux = jax.linearize(_probed(f), primals, probes, has_aux=True)

    def pull(cotangents):
        return jax.linear_transpose(forward, primals, probes)(cotangents)

    def push(tangents):
        zeros = {name: jnp.zeros_like(probe) for name, probe in probes.items()}
        return forward(_like(tangents, primals), zeros)

    return _linearization(outputs, aux, pull)._replace(push=push)


def _probed(f):
    """`f` with probes added at its taps, whose gradients are those at the taps."""

    def probed(primals, probes):
        def tap(name, tensor):
            return tensor + probes[name] if name in probes else tensor

        outputs, aux = f(primals, tap)
        return list(outputs), aux

    return probed


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


def _linearization(outputs, aux, pull):
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


def _like(tangents, primals):
    """Tangents in the dtypes of the primals, which may be half precision."""
    return [jnp.asarray(t, p.dtype) for t, p in zip(tangents, primals, strict=True)]


def linearize_gradient(f, primals):
    """The gradient of the scalar `f(primals)`, and `v -> H v`: forward over reverse."""
    primals = list(primals)
    gradient, forward = jax.linearize(jax.grad(lambda p: f(list(p))), primals)
    return gradient, lambda tangents: forward(_like(tangents, primals))


def compiled(function):
    """The function under `jax.jit`, also where `stepwise` switches that off."""
    jitted = jax.jit(function)

    def run(*arguments):
        with jax.disable_jit(False):
            return jitted(*arguments)

    return run


def portable(product, vector):
    """`product` as its expression, with the tensors that it closes over beside it."""
    closed, result = jax.make_jaxpr(product, return_shape=True)(vector)
    return Partial(_Expression(closed.jaxpr, jax.tree.structure(result)), closed.consts)


class _Expression:
    """A traced function; compared by identity, so that one is compiled once."""

    def __init__(self, jaxpr, structure):
        self._jaxpr, self._structure = jaxpr, structure

    def __call__(self, consts, vector):
        evaluate = jaxpr_as_fun(ClosedJaxpr(self._jaxpr, consts))
        return jax.tree.unflatten(self._structure, evaluate(*jax.tree.leaves(vector)))


def stepwise():
    """A context in which loops run in Python."""
    return jax.disable_jit()


def eagerly(function):
    """The value of `function()`, computed at once, also while tracing."""
    with jax.ensure_compile_time_eval():
        return function()


def no_grad():
    """Nothing to switch off: JAX differentiates only what it is asked to."""
    return contextlib.nullcontext()


def random_state():
    """None: all draws come from Keras's seed variables."""


def set_random_state(state):
    """Nothing to set."""


def interpolate(old, new, weight):
    """`old + weight (new - old)`."""
    return (1.0 - weight) * old + weight * new


def inner(a, b):
    """The sum of `a * b` over all entries."""
    return jnp.sum(a * b)


def full_precision():
    """A context without TensorFloat-32: on a GPU it is JAX's default."""
    return jax.default_matmul_precision("highest")


def spd_inverses(matrices, dampings, scales, compiled=False):
    """Invert damped positive definite matrices; NaN where one is not definite.

    On one CPU device they go to LAPACK's potrf and potri on the host, all in one call:
    calls side by side would share the cores with one another. Elsewhere they stay
    where they are, also on a single core: a call to the host waits there for a copy of
    its arguments, which would have to be made by the thread that waits.
    """
    if matrices and _host_pays():
        return jax.pure_callback(
            lapack_inverses, _like_them(matrices), matrices, dampings, scales
        )
    return [
        _damped_inverse(*system)
        for system in zip(matrices, dampings, scales, strict=True)
    ]


def orthonormal(matrices, compiled=False):
    """Orthonormal bases; on the host where `spd_inverses` are, and for its reasons."""
    if matrices and _host_pays():
        return jax.pure_callback(lapack_orthonormal, _like_them(matrices), matrices)
    return [jnp.linalg.qr(m)[0] for m in matrices]


def _like_them(matrices):
    return [jax.ShapeDtypeStruct(m.shape, m.dtype) for m in matrices]


def _host_pays() -> bool:
    one_device = jax.default_backend() == "cpu" and jax.device_count() == 1
    return one_device and _cores() > 1


def _cores() -> int:
    """Number of cores that the process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def symmetric_eigh(matrices, compiled=False):
    """Eigenvalues and eigenvectors; NaN where there are none.

    JAX calls LAPACK's syevd itself on a CPU, so nothing is gained by the host.
    """
    pairs = []
    for matrix in matrices:
        values, vectors = jnp.linalg.eigh(matrix, symmetrize_input=False)
        sound = jnp.all(jnp.isfinite(matrix), axis=(-2, -1), keepdims=True)
        vectors = jnp.where(sound, vectors, jnp.nan)
        pairs.append((jnp.where(sound[..., 0], values, jnp.nan), vectors))
    return pairs


def _damped_inverse(matrix, damping, scale):
    identity = jnp.eye(matrix.shape[-1], dtype=matrix.dtype)
    scale = scale[..., None, None]
    damped = (matrix + damping[..., None, None] * identity) / scale
    factor = jax.lax.linalg.cholesky(damped, symmetrize_input=False)
    half = jax.scipy.linalg.solve_triangular(
        factor, jnp.broadcast_to(identity, matrix.shape), lower=True
    )
    return jnp.swapaxes(half, -1, -2) @ half / scale
