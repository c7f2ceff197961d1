"""The autodiff contract on TensorFlow."""

import concurrent.futures
import contextlib

import tensorflow as tf

from keras_secondorder.autodiff.contract import Linearization
from keras_secondorder.autodiff.host import (
    lapack_eighs,
    lapack_inverses,
    lapack_orthonormal,
)


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

    def dense(gradient, source):
        # An embedding's gradient comes as slices, which have lost the static shape.
        gradient = tf.convert_to_tensor(gradient)
        gradient.set_shape(source.shape)
        return gradient

    # Composite tensors are leaves here.
    return tf.nest.map_structure(dense, gradients, sources)


def linearize_gradient(f, primals):
    """The gradient of the scalar `f(primals)`, and `v -> H v`: reverse over reverse."""
    primals = [tf.identity(p) for p in primals]
    with tf.GradientTape(True, watch_accessed_variables=False) as outer:
        outer.watch(primals)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(primals)
            with _exact_moments():
                value = f(primals)
        gradient = _gradients(tape, [value], primals, [tf.ones_like(value)])

    def product(tangents):
        return _gradients(outer, gradient, primals, tangents)

    return gradient, product


@contextlib.contextmanager
def _exact_moments():
    """Batch normalisation that can be differentiated twice.

    `tf.nn.moments` stops the gradient of the variance at the mean. That gradient is
    zero, but its derivative is not, and the Hessian would be wrong in silence.
    """
    original = tf.nn.moments

    def moments(x, axes, shift=None, keepdims=False, name=None):
        mean = tf.reduce_mean(x, axes, keepdims=True)
        variance = tf.reduce_mean(tf.square(x - mean), axes, keepdims=keepdims)
        return mean if keepdims else tf.reduce_mean(x, axes), variance

    tf.nn.moments = moments
    try:
        yield
    finally:
        tf.nn.moments = original


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


def random_state():
    """None: all draws come from Keras's seed variables."""


def set_random_state(state):
    """Nothing to set."""


def interpolate(old, new, weight):
    """`old + weight (new - old)`."""
    return (1.0 - weight) * old + weight * new


def inner(a, b):
    """The sum of `a * b` over all entries."""
    return tf.reduce_sum(a * b)


def full_precision():
    """Nothing to ask for: TensorFlow has one switch for a whole program."""
    return contextlib.nullcontext()


def spd_inverses(matrices, dampings, scales, compiled=False):
    """Invert damped positive definite matrices; NaN where one is not definite.

    Outside XLA they go to LAPACK's potrf and potri on the host: TensorFlow's own
    Cholesky raises where a matrix is not definite, which would end the training.
    """
    if compiled or not matrices:
        return [
            _damped_inverse(*system)
            for system in zip(matrices, dampings, scales, strict=True)
        ]
    count = len(matrices)

    def inverted(*arrays):
        return lapack_inverses(*(arrays[i * count :][:count] for i in range(3)))

    return _on_host(inverted, [*matrices, *dampings, *scales], matrices)


def orthonormal(matrices, compiled=False):
    """Orthonormal bases, outside XLA by LAPACK on the host: it takes half the time."""
    if compiled or not matrices:
        return [tf.linalg.qr(m)[0] for m in matrices]
    return _on_host(lambda *arrays: lapack_orthonormal(arrays), matrices, matrices)


def _on_host(function, arguments, like):
    """What a function of NumPy arrays returns: arrays shaped like some others."""
    results = tf.numpy_function(function, arguments, [m.dtype for m in like])
    results = tf.nest.flatten(results)  # a single one comes without its list
    return [
        tf.ensure_shape(result, matrix.shape)
        for result, matrix in zip(results, like, strict=True)
    ]


def symmetric_eigh(matrices, compiled=False):
    """Eigenvalues and eigenvectors; NaN where there are none.

    Outside XLA they go to LAPACK's syevd on the host, as TensorFlow's own raises where
    there are none. Inside XLA they come from its Jacobi iteration, which is exact but
    far slower.
    """
    if compiled or not matrices:
        return [_xla_eigh(m) for m in matrices]
    types = [m.dtype for m in matrices for _ in range(2)]
    arrays = tf.numpy_function(lambda *m: lapack_eighs(m), matrices, types)
    return [
        (
            tf.ensure_shape(values, matrix.shape[:-1]),
            tf.ensure_shape(vectors, matrix.shape),
        )
        for values, vectors, matrix in zip(
            arrays[::2], arrays[1::2], matrices, strict=True
        )
    ]


def _xla_eigh(matrix):
    values, vectors = tf.linalg.eigh(matrix)
    finite = tf.math.is_finite(matrix)
    sound = tf.reduce_all(finite, axis=[-2, -1], keepdims=True)
    nan = tf.fill(tf.shape(matrix), tf.constant(float("nan"), matrix.dtype))
    vectors = tf.where(sound, vectors, nan)
    return tf.where(sound[..., 0], values, nan[..., 0]), vectors


def _damped_inverse(matrix, damping, scale):
    identity = tf.eye(matrix.shape[-1], dtype=matrix.dtype)
    scale = scale[..., None, None]
    damped = (matrix + damping[..., None, None] * identity) / scale
    identity = tf.broadcast_to(identity, matrix.shape)
    half = tf.linalg.triangular_solve(tf.linalg.cholesky(damped), identity, lower=True)
    return tf.matmul(half, half, transpose_a=True) / scale
