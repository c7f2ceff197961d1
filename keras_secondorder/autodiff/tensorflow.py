"""The autodiff contract on TensorFlow."""

import concurrent.futures
import contextlib

import tensorflow as tf

from keras_secondorder.autodiff.contract import Linearization
from keras_secondorder.autodiff.host import lapack_inverses


def vjp(f, primals, taps=True):
    """Linearise `f(primals, tap)` for reverse passes (see `contract.py`)."""
    return _reverse(f, primals, taps)[0]


def linearize(f, primals, taps=False):
    """Linearise `f(primals, tap)` for both directions (see `contract.py`)."""
    linear, tape, primals, outputs = _reverse(f, primals, taps)
    # Recorded here and not at the first push, which may stand inside a loop.
    u = [tf.zeros_like(o) for o in outputs]
    with tf.GradientTape(True, watch_accessed_variables=False) as outer:
        outer.watch(u)
        pulled = _gradients(tape, outputs, primals, u)

    def push(tangents):
        return _gradients(outer, pulled, u, tangents)

    return linear._replace(push=push)


def _reverse(f, primals, taps):
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
        return _gradients(tape, outputs, sources, cotangents)

    def pullback_all(cotangents):
        return pull(cotangents, (primals, tapped))

    linear = Linearization(
        outputs,
        aux,
        pullback=lambda c: pull(c, primals),
        pullback_taps=lambda c: pull(c, tapped),
        pullback_all=pullback_all,
    )
    return linear, tape, primals, outputs


def _gradients(tape, outputs, sources, cotangents):
    """Reverse pass from `outputs`; zeros where a source is not reached."""
    given = [
        (o, tf.cast(c, o.dtype))
        for o, c in zip(outputs, cotangents, strict=True)
        if c is not None
    ]
    gradients = tape.gradient(
        [o for o, _ in given],
        sources,
        output_gradients=[c for _, c in given],
        unconnected_gradients=tf.UnconnectedGradients.ZERO,
    )
    # An embedding's gradient comes as slices; composite tensors are leaves here.
    return tf.nest.map_structure(tf.convert_to_tensor, gradients)


def linearize_gradient(f, primals):
    """The gradient of the scalar `f(primals)`, and `v -> H v`: reverse over reverse."""
    primals = [tf.identity(p) for p in primals]
    with tf.GradientTape(True, watch_accessed_variables=False) as outer:
        outer.watch(primals)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(primals)
            with _differentiable_moments():
                value = f(primals)
        gradient = _gradients(tape, [value], primals, [tf.ones_like(value)])

    def product(tangents):
        return _gradients(outer, gradient, primals, tangents)

    return gradient, product


@contextlib.contextmanager
def _differentiable_moments():
    """A `tf.nn.moments` that can be differentiated twice, for Keras to call.

    TensorFlow's stops the gradient at the mean inside the variance, which leaves the
    first derivative as it is, and makes the second one wrong.
    """
    original = tf.nn.moments

    def moments(x, axes, shift=None, keepdims=False, name=None):
        y = tf.cast(x, tf.float32) if x.dtype == tf.float16 else x
        mean = tf.reduce_mean(y, axes, keepdims=True)
        variance = tf.reduce_mean((y - mean) ** 2, axes, keepdims)
        mean = tf.reshape(mean, tf.shape(variance))
        return tf.cast(mean, x.dtype), tf.cast(variance, x.dtype)

    tf.nn.moments = moments
    try:
        yield
    finally:
        tf.nn.moments = original


def compiled(function):
    """The function itself: a tape cannot leave a TensorFlow function."""
    return function


def portable(product, vector):
    """The product itself: it never leaves a compiled function."""
    return product


def stepwise():
    """Nothing to switch off: outside of a compiled function loops run in Python."""
    return contextlib.nullcontext()


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
    identity = tf.eye(tf.shape(matrix)[-1], dtype=matrix.dtype)
    half = tf.linalg.triangular_solve(factor, identity, lower=True)
    return tf.matmul(half, half, transpose_a=True)
