"""The curvature of the objective with respect to all outputs of the network."""

from collections.abc import Callable
from typing import NamedTuple

from keras import ops

from keras_secondorder.likelihoods.base import Likelihood
from keras_secondorder.likelihoods.position_weights import by_position, label_mass


class Curve(NamedTuple):
    """The output distribution of one head at some outputs of the network.

    Attributes:
        output: Index of the output among the flattened outputs.
        likelihood: Its `Likelihood`.
        weights: Weight in the objective of every position.
    """

    output: int
    likelihood: Likelihood
    weights: object


def fisher_gram(curves: list[Curve], outputs: list, pushed: list):
    """`M[i, j] = v_i^T F v_j` with the exact Fisher matrix of the outputs.

    Args:
        curves: The heads' likelihoods.
        outputs: Outputs of the network.
        pushed: For each vector `v_i`, the output tangents `J v_i`.

    Returns:
        A symmetric matrix of shape `(k, k)`, float32.

    References:
        Martens (2016), thesis, section 6.6.4 and appendix B.3.
    """
    k = len(pushed)
    gram = [[0.0] * k for _ in range(k)]
    for curve in curves:
        z = by_position(outputs[curve.output], curve.weights)
        tangents = [by_position(p[curve.output], curve.weights) for p in pushed]
        weight = curve.weights[..., None] * curve.likelihood.scale(z)
        products = [curve.likelihood.hessian_product(z, t) for t in tangents]
        for i in range(k):
            for j in range(i + 1):
                gram[i][j] = gram[i][j] + ops.sum(weight * tangents[i] * products[j])
    full = [[gram[max(i, j)][min(i, j)] for j in range(k)] for i in range(k)]
    return ops.reshape(ops.stack([entry for row in full for entry in row]), (k, k))


def curvature_cotangents(curves: list[Curve], outputs: list, tangents: list) -> list:
    """The objective's curvature at the outputs times output tangents.

    Args:
        curves: The heads' likelihoods.
        outputs: Outputs of the network.
        tangents: `J v`, shaped like the outputs.

    Returns:
        `H_z J v`: one cotangent for each output, None for an output without a loss.
    """

    def product(curve, z):
        t = by_position(tangents[curve.output], curve.weights)
        weight = curve.weights * curve.likelihood.scale(z)
        return weight[..., None] * curve.likelihood.hessian_product(z, t)

    return _by_output(curves, outputs, product)


def sqrt_cotangents(curves: list[Curve], outputs: list, root: Callable) -> list:
    """Cotangents of the outputs whose second moment is the objective's curvature.

    Args:
        curves: The heads' likelihoods.
        outputs: Outputs of the network.
        root: `root(curve, z)`, the square-root vectors at the positions of `z`.

    Returns:
        One cotangent for each output, None for an output without a loss.
    """

    def vector(curve, z):
        weight = ops.sqrt(curve.weights * curve.likelihood.scale(z))
        return weight[..., None] * root(curve, z)

    return _by_output(curves, outputs, vector)


def gradient_weights(curve: Curve, z, loss, y):
    """Weights of the outer products of the loss's gradients, for the empirical Fisher.

    Args:
        curve: The head's likelihood.
        z: Its output.
        loss: The Keras loss.
        y: The targets.
    """
    weights = curve.weights
    if len(weights.shape) == 0:  # one number: a mean over the examples
        weights = weights * ops.cast(ops.shape(z)[0], weights.dtype)
    mass = label_mass(loss, y)  # the gradients have it, and the weights too
    if mass is not None:
        weights = ops.divide_no_nan(weights, ops.cast(mass, weights.dtype))
    return weights / curve.likelihood.scale(by_position(z, curve.weights))


def _by_output(curves, outputs, vector) -> list:
    """Sums of `vector(curve, z by position)` over the curves of each output."""
    cotangents = [None] * len(outputs)
    for curve in curves:
        z = outputs[curve.output]
        part = vector(curve, by_position(z, curve.weights))
        part = ops.reshape(part, ops.shape(z))
        before = cotangents[curve.output]
        cotangents[curve.output] = part if before is None else before + part
    return cotangents


def effective_examples(weights: list, examples):
    """How many examples of equal weight say as much as those of a batch.

    ```
    (sum_n w_n)^2 / sum_n w_n^2
    ```

    Args:
        weights: Position weights of the heads.
        examples: Number of examples.

    Returns:
        A scalar: `examples` where all weigh alike; those without weight do not count.

    References:
        Kish (1965), *Survey sampling*.
    """
    w = ops.sum(example_weights(weights, examples), axis=1)
    return 1.0 / ops.maximum(ops.sum(w * w), 1e-30)


def example_weights(weights: list, examples):
    """Weights of the examples or of their positions, summing to 1 over the batch.

    Args:
        weights: Position weights of the heads.
        examples: Number of examples.

    Returns:
        Shape `(N, T)` where all heads have the positions `(N, T)`, else `(N, 1)`.
    """
    per_position = all(len(w.shape) == 2 for w in weights) and (
        len({w.shape[1] for w in weights}) == 1
    )
    total = 0.0
    for w in weights:
        if len(w.shape) == 0:
            w = ops.broadcast_to(w, (examples,))
        if not per_position:
            w = ops.sum(ops.reshape(w, (examples, -1)), axis=1, keepdims=True)
        total = total + w
    if not weights:
        total = ops.ones((examples, 1))
    # A batch of nothing but zero weights has no statistics; keep the sum finite.
    return total / ops.maximum(ops.sum(total), 1e-30)
