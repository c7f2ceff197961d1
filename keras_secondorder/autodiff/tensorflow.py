"""The autodiff contract on TensorFlow."""

import concurrent.futures
import contextlib

import tensorflow as tf

from keras_secondorder.autodiff.contract import Linearization
from keras_secondorder.autodiff.host import lapack_inverses


def vjp(f, primals, taps=True):
    """Linearise `f(primals, tap)` for reverse passes (see `contract.py`)."""
    primals = [tf.identity(p) for p in primals]
    tapped = {}

    def tap(name, tensor):
        if taps:
            tensor = tf.identity(tensor)
            tape.watch(tensor)
            tapped[name] = tensor
        return tensor

    with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
        tape.watch(primals)
        outputs, aux = f(primals, tap)
        outputs = list(outputs)

    def pull(cotangents, sources):
        given = [
            (o, tf.cast(c, o.dtype))
            for o, c in zip(outputs, cotangents, strict=True)
            if c is not None
        ]
        targets, seeds = [o for o, _ in given], [c for _, c in given]
        gradients = tape.gradient(
            targets,
            sources,
            output_gradients=seeds,
            unconnected_gradients=tf.UnconnectedGradients.ZERO,
        )
        # An embedding's gradient comes as slices; composite tensors are leaves here.
        return tf.nest.map_structure(tf.convert_to_tensor, gradients)

    def pullback_all(cotangents):
        return pull(cotangents, (primals, tapped))

    return Linearization(
        outputs,
        aux,
        pullback=lambda c: pull(c, primals),
        pullback_taps=lambda c: pull(c, tapped),
        pullback_all=pullback_all,
    )


def jvp(f, primals, tangents):
    """Outputs of `f(primals)` and their derivative along `tangents`."""
    primals = [tf.identity(p) for p in primals]
    tangents = [tf.cast(t, p.dtype) for t, p in zip(tangents, primals, strict=True)]
    with tf.autodiff.ForwardAccumulator(primals, tangents) as accumulator:
        outputs = list(f(primals))
    return outputs, [
        accumulator.jvp(o, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        for o in outputs
    ]


def linearize(f, primals):
    """Outputs of `f(primals)`, and a function that pushes tangents forward.

    TensorFlow's forward mode runs beside the computation it differentiates, so each
    push repeats it; inside one compiled function the copies share the primal part.
    """
    return list(f(primals)), lambda tangents: jvp(f, primals, tangents)[1]


def hessian_product(f, primals, tangents):
    """`H v` of the scalar `f(primals)`, forward over reverse."""
    primals = [tf.identity(p) for p in primals]
    tangents = [tf.cast(t, p.dtype) for t, p in zip(tangents, primals, strict=True)]
    zero = tf.UnconnectedGradients.ZERO
    with tf.autodiff.ForwardAccumulator(primals, tangents) as accumulator:
        with tf.GradientTape() as tape:
            tape.watch(primals)
            value = f(primals)
        gradient = tape.gradient(value, primals, unconnected_gradients=zero)
        gradient = [tf.convert_to_tensor(g) for g in gradient]
    return [accumulator.jvp(g, unconnected_gradients=zero) for g in gradient]


def eagerly(function):
    """The value of `function()`, computed at once, also while tracing.

    A thread of its own has neither a graph under construction nor open tapes;
    `tf.init_scope` would stop every tape, and derivatives would be zero.
    """
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(function).result()


def no_grad():
    """Nothing to switch off: only an open tape records."""
    return contextlib.nullcontext()


def spd_inverses(matrices, compiled=False):
    """Invert symmetric positive definite matrices; NaN where one is not definite.

    Outside XLA they go to LAPACK's potrf and potri on the host: TensorFlow's own
    Cholesky raises where a matrix is not definite, which would end the training.
    """
    if compiled or not matrices:
        return [_cholesky_inverse(m) for m in matrices]
    types = [m.dtype for m in matrices]
    inverses = tf.numpy_function(lambda *m: lapack_inverses(m), matrices, types)
    inverses = tf.nest.flatten(inverses)  # a single one comes without its list
    return [
        tf.ensure_shape(inverse, matrix.shape)
        for inverse, matrix in zip(inverses, matrices, strict=True)
    ]


def _cholesky_inverse(matrix):
    factor = tf.linalg.cholesky(matrix)
    identity = tf.eye(matrix.shape[-1], dtype=matrix.dtype)
    identity = tf.broadcast_to(identity, matrix.shape)
    half = tf.linalg.triangular_solve(factor, identity, lower=True)
    return tf.matmul(half, half, transpose_a=True)
