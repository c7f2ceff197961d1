"""Products with the curvature matrices of one batch, at one point."""

import math
from collections.abc import Callable
from typing import NamedTuple

from keras import ops

from keras_secondorder import autodiff
from keras_secondorder.capture import l2_curvature
from keras_secondorder.curvature.statistics import loss_cotangents
from keras_secondorder.likelihoods import (
    CounterSeed,
    by_position,
    curvature_cotangents,
    sqrt_cotangents,
)
from keras_secondorder.objective import Objective


class Products(NamedTuple):
    """A curvature matrix `C`, ready to be multiplied by.

    Attributes:
        product: `v -> C v`, lists of tensors shaped like the trainable variables.
        root: `u -> R u` where `C = R R^T`, up to penalties; None where there is none.
        root_shapes: Shapes of the tensors in `u`.
    """

    product: Callable
    root: Callable | None = None
    root_shapes: tuple = ()


def hessian_products(objective: Objective) -> Products:
    """The Hessian of the objective, penalties included.

    Args:
        objective: The batch.

    References:
        Pearlmutter (1994); Martens (2016), thesis, section 2.2.
    """
    _, product = autodiff.linearize_gradient(objective.value, objective.parameters)
    return Products(product)


def gauss_newton_products(
    objective: Objective, network=None, structural=None
) -> Products:
    """`C = J^T H_z J + diag(eta)`, the generalised Gauss-Newton matrix.

    `H_z` is the Hessian of the loss with respect to the outputs, and `eta` the
    curvature of the L2 penalties.

    Args:
        objective: The batch.
        network: Its `linearize_network()`, where it is at hand.
        structural: See `fisher_products`.

    References:
        Schraudolph (2002); Martens (2016), thesis, section 4.3.
    """
    fisher = fisher_products(objective, network, structural)
    eta = [l2_curvature(v) for v in objective.variables]

    def product(v):
        Gv = fisher.product(v)
        return [
            g + e * ops.cast(a, g.dtype) for g, e, a in zip(Gv, eta, v, strict=True)
        ]

    return fisher._replace(product=product) if any(eta) else fisher


def fisher_products(objective: Objective, network=None, structural=None) -> Products:
    """`C = J^T F_z J` with the exact Fisher matrix `F_z` of the outputs.

    Structural damping adds `structural * mean_n J_a^T J_a` for the activations that the
    network was linearised with: the curvature of half their squared change. Both parts
    share one pass in each direction.

    Args:
        objective: The batch; its targets do not matter.
        network: Its `linearize_network()`, where it is at hand.
        structural: Weight of the structural damping, a scalar, or None.

    References:
        Martens (2016), thesis, sections 5.1 and 5.5; Pascanu & Bengio (2014), eq. 8.
        Martens & Sutskever (2011), section 3.2; thesis, section 4.6.4.
    """
    network = network or objective.linearize_network()
    outputs, (weights, _) = network.outputs, network.aux
    curves = [
        c._replace(
            likelihood=c.likelihood.at(by_position(outputs[c.output], c.weights))
        )
        for c in objective.curves(outputs, weights)
    ]

    def product(v):
        tangents = network.push(v)
        cotangents = curvature_cotangents(curves, outputs, tangents)
        if structural is not None:
            weight = structural / ops.cast(objective.examples, objective.precision)
            for i in range(objective.output_count, len(outputs)):
                cotangents[i] = weight * tangents[i]
        return network.pullback(cotangents)

    def root(u):
        u = iter(u)  # one tensor for each curve, which are asked in order

        def vector(curve, z):
            return curve.likelihood.sqrt_product(z, next(u))

        return network.pullback(sqrt_cotangents(curves, outputs, vector))

    shapes = [ops.shape(by_position(outputs[c.output], c.weights)) for c in curves]
    return Products(product, root, tuple(shapes))


def sampled_fisher_products(
    objective: Objective, samples: int, seed: int, number=0
) -> Products:
    """The Fisher matrix with targets drawn from the model, averaged over draws.

    Args:
        objective: The batch; its targets do not matter.
        samples: Number of draws for each example.
        seed: Python integer.
        number: Number of the batch, an integer scalar; each has draws of its own.

    References:
        Martens (2016), thesis, section 6.5.
    """
    network = objective.linearize_network()
    curves = objective.curves(network.outputs, network.aux[0])
    heads = sorted({curve.output for curve in curves})

    def draw(i):
        random = CounterSeed(seed, ops.cast(number, "int32") * samples + i)

        def sampled(curve, z):
            return curve.likelihood.sampled_sqrt(z, random)

        cotangents = sqrt_cotangents(curves, network.outputs, sampled)
        return [cotangents[head] for head in heads]

    # A loop, so that what is compiled does not grow with the number of draws.
    stacked = ops.map(draw, ops.arange(samples, dtype="int32"))
    scale, drawn = 1.0 / math.sqrt(samples), [None] * len(network.outputs)
    for head, cotangents in zip(heads, stacked, strict=True):
        drawn[head] = cotangents * scale
    return _outer_products(network, drawn, samples, objective.examples)


def empirical_fisher_products(objective: Objective, centered: bool = False) -> Products:
    """The second moment, or the covariance, of the gradients of single examples.

    ```
    C = sum_n w_n g_n g_n^T   [- g g^T,  g = sum_n w_n g_n / sqrt(sum_n w_n)]
    ```

    with `w_n` the weight of example n in the objective, and the gradient of the loss
    over the root of the loss's own constant, so that targets from the model itself
    would give the Fisher matrix in expectation. Of an example with several positions
    or heads, `sqrt(w_n) g_n` is the sum of theirs.

    Args:
        objective: The batch.
        centered: Whether the mean is taken out.

    References:
        Le Roux, Manzagol & Bengio (2008); Martens (2016), thesis, section 5.6.
    """
    network = objective.linearize_network()
    curves = objective.curves(network.outputs, network.aux[0], gradient_only=True)
    cotangents = loss_cotangents(objective, network.outputs, curves)
    once = [None if c is None else c[None] for c in cotangents]
    products = _outer_products(network, once, 1, objective.examples)
    if not centered:
        return products
    omega = sum(_example_weights(c.weights, objective.examples) for c in curves)
    share = ops.divide_no_nan(omega, ops.sum(omega))  # no weights: no mean either
    along_mean = ops.sqrt(share)
    mean = network.pullback(times_by_example(cotangents, along_mean))

    def product(v):
        along = sum(
            ops.sum(m * ops.cast(a, m.dtype)) for m, a in zip(mean, v, strict=True)
        )
        Cv = products.product(v)
        return [c - along * m for c, m in zip(Cv, mean, strict=True)]

    def root(u):
        (u,) = u
        return products.root([u - along_mean * ops.sum(along_mean * u)])

    return Products(product, root, products.root_shapes)


def _outer_products(network, drawn: list, draws: int, examples) -> Products:
    """`sum over draws and examples of s s^T`, `s` the pulled-back cotangent.

    Args:
        network: The linearised network.
        drawn: Cotangents of each output, the draws as first axis, or None.
        draws: Number of draws.
        examples: Number of examples.
    """

    def spread(numbers, c):
        return ops.reshape(numbers, (draws, -1, *[1] * (len(c.shape) - 2)))

    def pull(numbers):
        """Every draw's and example's cotangents times a number of its own, summed."""
        return network.pullback(
            [None if c is None else ops.sum(c * spread(numbers, c), 0) for c in drawn]
        )

    def product(v):
        along = sum(
            ops.sum(ops.reshape(c * t, (draws, examples, -1)), axis=-1)
            for c, t in zip(drawn, network.push(v), strict=True)
            if c is not None
        )
        return pull(along)

    return Products(product, lambda u: pull(u[0]), ((draws, examples),))


def _example_weights(weights, examples):
    """The weight of every example: the sum of those of its positions."""
    if len(weights.shape) == 0:
        return ops.broadcast_to(weights / examples, (examples,))
    return ops.sum(ops.reshape(weights, (examples, -1)), axis=1)


def times_by_example(cotangents, numbers):
    """Every example's cotangents times a number of its own."""
    return [
        None if c is None else c * ops.reshape(numbers, (-1, *[1] * (len(c.shape) - 1)))
        for c in cotangents
    ]
