"""The Kronecker factors and diagonals of one batch, for each kind of Fisher matrix."""

import functools
import math

from keras import ops

from keras_secondorder import autodiff
from keras_secondorder.capture import of_wrapper
from keras_secondorder.likelihoods import (
    CounterSeed,
    Curve,
    by_position,
    example_weights,
    gradient_weights,
    loss_values,
    sqrt_cotangents,
)

FISHERS = ("sampled", "exact", "empirical")
# Up to here the reverse passes of the exact Fisher are written out one by one, which
# compiles to faster code; beyond, they run in a loop.
UNROLLED = 16


def batch_factors(objective, linear, blocks, fisher, fraction, seed, counter) -> list:
    """The statistics of one batch, of every block that keeps some.

    ```
    A = sum_n w_n a_n a_n^T / sum_n w_n
    G = sum_n w_n E[g_n g_n^T]      with the expectation over the targets:
        sampled:    one draw of the targets from the model
        exact:      all square-root vectors of the output Fisher matrix
        empirical:  the labels
    ```

    `w_n` is the weight of example n in the objective, so that `A (x) G` is the
    curvature of what Keras minimises.

    Args:
        objective: The batch.
        linear: Its linearisation, with taps where the whole batch is used.
        blocks: The blocks of the optimizer.
        fisher: "sampled", "exact" or "empirical".
        fraction: Share of the batch to use.
        seed: Python integer.
        counter: Step number, an integer scalar.

    Returns:
        For each block, tensors to be averaged into its `factors`.

    References:
        Martens (2016), thesis, sections 6.3, 6.5 and 6.8.
    """
    x, rows, weights = objective.subset(fraction, linear.aux.weights)
    if rows is None:
        network, lead = linear, 1
        inputs = linear.aux.inputs
    else:
        network, lead = objective.linearize_outputs(x), 0
        inputs = network.aux
    outputs = network.outputs[lead:]
    curves = objective.curves(outputs, weights, rows, fisher == "empirical")
    random = CounterSeed(seed, counter)
    index = {id(w): i for i, w in enumerate(objective.wrappers)}
    layers = [b for b in blocks if b.wrapper is not None]
    diagonal = any(b.wrapper is None and b.factors for b in blocks)
    omega = example_weights(weights, ops.shape(outputs[0])[0])

    def pull(cotangents):
        cotangents = [None] * lead + cotangents
        if diagonal:
            return network.pullback_all(cotangents)
        return None, network.pullback_taps(cotangents)

    def places_of(block):
        """The block's layer and, in a chain, the one that follows."""
        return [index[id(w)] for w in (block.wrapper, block.successor) if w]

    def inputs_of(block):
        return [a for i in places_of(block) for a in inputs[i]]

    def gradient_factors(taps):
        statistics = []
        for block in layers:
            g = [t for i in places_of(block) for t in of_wrapper(taps, i)]
            statistics += block.gradient_statistics(inputs_of(block), g, omega)
        return statistics

    def sampled(curve, z):
        return curve.likelihood.sampled_sqrt(z, random)

    if fisher == "empirical":
        gradients, taps = pull(loss_cotangents(objective, outputs, curves, rows))
    else:
        gradients, taps = pull(sqrt_cotangents(curves, outputs, sampled))
    if fisher == "exact":
        G = _exact(network, lead, curves, outputs, gradient_factors, taps)
    else:
        G = gradient_factors(taps)

    G = iter(G)
    places = {id(v): i for i, v in enumerate(objective.variables)}
    factors = []
    for block in blocks:
        if block.wrapper is not None:
            A = block.input_statistics(inputs_of(block), omega)
            left = len(block.factors) - len(A)
            factors.append([*A, *(next(G) for _ in range(left))])
        elif block.factors:
            g = gradients[places[id(block.variables[0])]]
            factors.append([ops.cast(g, "float32") ** 2])
        else:
            factors.append([])
    return factors


def loss_cotangents(objective, outputs: list, curves: list[Curve], rows=None) -> list:
    """Gradients of the loss at the outputs, over the square root of the weight.

    Their outer products sum to the empirical Fisher matrix.

    Args:
        objective: The batch.
        outputs: Outputs of the network for the examples in question.
        curves: The heads' likelihoods there.
        rows: Indices of the examples in the batch, or None for all.
    """
    cotangents = [None] * len(outputs)
    for head, curve in zip(objective.heads, curves, strict=True):
        y = head.y if rows is None else ops.take(head.y, rows, axis=0)

        def total(primals, tap, head=head, y=y):
            return [ops.sum(loss_values(head.loss, y, primals[0]))], ()

        z = outputs[curve.output]
        linear = autodiff.vjp(total, [z], taps=False)
        gradient = linear.pullback([ops.ones_like(linear.outputs[0])])[0]
        grouped = by_position(gradient, curve.weights)
        weight = ops.sqrt(gradient_weights(curve, z, head.loss, y))[..., None]
        before = cotangents[curve.output]
        vector = ops.reshape(weight * grouped, ops.shape(z))
        cotangents[curve.output] = vector if before is None else before + vector
    return cotangents


def _exact(network, lead, curves, outputs, gradient_factors, like):
    """`G` summed over the columns of the square root of the output Fisher matrix."""
    total = [ops.zeros_like(g) for g in gradient_factors(like)]
    for curve in curves:
        add = functools.partial(_add_column, curve, network, lead, curves, outputs)
        columns = math.prod(_within(curve, outputs))
        if columns <= UNROLLED:
            for k in range(columns):
                total = add(gradient_factors, k, total)
        else:
            body = functools.partial(add, gradient_factors)
            total = ops.fori_loop(0, columns, body, total)
    return total


def _within(curve, outputs) -> tuple:
    """The axes of one example's outputs."""
    z = by_position(outputs[curve.output], curve.weights)
    return tuple(z.shape[1:]) if len(curve.weights.shape) else ()


def _add_column(head, network, lead, curves, outputs, gradient_factors, k, total):
    """Add what column `k` of one head's square root contributes."""
    within = _within(head, outputs)

    def column(curve, z):
        if curve is not head:
            return ops.zeros_like(z)
        if not within:
            return curve.likelihood.sqrt_product(z, ops.ones_like(z))
        one_hot = ops.one_hot(k, math.prod(within), dtype=z.dtype)
        u = ops.broadcast_to(ops.reshape(one_hot, within)[None], ops.shape(z))
        return curve.likelihood.sqrt_product(z, u)

    cotangents = sqrt_cotangents(curves, outputs, column)
    taps = network.pullback_taps([None] * lead + cotangents)
    return [t + g for t, g in zip(total, gradient_factors(taps), strict=True)]
