"""The squares of the gradients of single examples, summed: a curvature's diagonal."""

import keras
from keras import ops

from keras_secondorder.autodiff import Linearization
from keras_secondorder.capture import of_wrapper, plan_blocks
from keras_secondorder.capture.dense import DenseWrapper
from keras_secondorder.curvature.products import times_by_example
from keras_secondorder.curvature.statistics import loss_cotangents
from keras_secondorder.likelihoods import CounterSeed, sqrt_cotangents
from keras_secondorder.objective import Objective

DIAGONALS = ("empirical", "gauss_newton")


def dense_wrappers(model) -> tuple:
    """The wrappers of the layers for which the squares are exact."""
    blocks = [b.wrapper for b in plan_blocks(model)]
    return tuple(w for w in blocks if type(w) is DenseWrapper)


def curvature_diagonal(
    objective: Objective, network: Linearization, kind: str, seed: int, counter
) -> list:
    """An estimate of the diagonal of a curvature matrix, from one reverse pass.

    ```
    sum_n (J_n^T c_n)^2     c_n:  "empirical"     the gradient of the loss
                                  "gauss_newton"  S u with S S^T = H_z, u of random +-1
    ```

    For a dense layer that sees an example once, `J_n^T c_n = a_n g_n^T`, so that the
    sum is `(A^2)^T G^2` and exact but for `u`. For other variables the gradients are
    added up under random signs, and the square of their sum is unbiased.

    Args:
        objective: The batch; its wrappers are those of `dense_wrappers`, or more.
        network: `objective.linearize_network(taps=True)`.
        kind: "empirical" or "gauss_newton".
        seed: Python integer.
        counter: Step number, an integer scalar.

    Returns:
        One non-negative tensor for each trainable variable.

    References:
        Martens (2016), thesis, sections 4.9.3 and 4.9.4; Chapelle & Erhan (2011).
    """
    outputs, (weights, inputs) = network.outputs, network.aux
    curves = objective.curves(outputs, weights, gradient_only=kind == "empirical")
    random = CounterSeed(seed, counter, stream=1)
    if kind == "empirical":
        cotangents = loss_cotangents(objective, outputs, curves)
    else:

        def root(curve, z):
            return curve.likelihood.sqrt_product(z, _signs(z, random))

        cotangents = sqrt_cotangents(curves, outputs, root)
    signs = _signs(ops.zeros((objective.examples,), objective.precision), random)
    gradients, taps = network.pullback_all(times_by_example(cotangents, signs))
    squares = [g * g for g in gradients]

    places = {id(v): i for i, v in enumerate(objective.variables)}
    for index, wrapper in enumerate(objective.wrappers):
        if type(wrapper) is not DenseWrapper:
            continue
        calls = zip(inputs.get(index, []), of_wrapper(taps, index), strict=True)
        rows = [(wrapper.input_rows(a), wrapper.gradient_rows(g)) for a, g in calls]
        if len(rows) != 1 or rows[0][0].shape[1] != 1:
            continue  # examples that it sees at several positions or in several calls
        ((a, g),) = rows
        exact = ops.matmul(ops.transpose(a[:, 0] ** 2), g[:, 0] ** 2)
        for v, part in zip(wrapper.variables, wrapper.from_matrix(exact), strict=True):
            squares[places[id(v)]] = ops.cast(part, objective.precision)
    return squares


def _signs(like, seed):
    draw = keras.random.uniform(ops.shape(like), seed=seed)
    return ops.cast(ops.where(draw < 0.5, -1.0, 1.0), like.dtype)
