"""The quadratic model of the objective, with the exact Fisher matrix of a batch."""

from collections.abc import Callable

from keras import ops

from keras_secondorder import vectors
from keras_secondorder.likelihoods import fisher_gram


def fisher_model(
    objective, weights, gradient, ridge: list, fraction: float
) -> Callable:
    """The damped quadratic model, to be evaluated in the span of a few vectors.

    ```
    M(delta) = 1/2 delta^T (F + diag(ridge)) delta + gradient . delta
    Q[i, j]  = (J v_i)^T F_z (J v_j) + v_i^T diag(ridge) v_j,   b[i] = gradient . v_i
    ```

    `F` is exact on the examples used, and takes one Jacobian-vector product a vector.

    Args:
        objective: The batch.
        weights: Position weights of the heads on the whole batch.
        gradient: Gradient of the objective.
        ridge: What is added to `F` on the diagonal, a scalar for each variable:
            `lambda + eta`.
        fraction: Share of the batch on which `F` is taken.

    Returns:
        `model(vectors) -> (Q, b)`, of shapes `(k, k)` and `(k,)`.

    References:
        Martens (2016), thesis, section 6.6.4 and appendix B.3.
    """
    x, rows, weights = objective.subset(fraction, weights)
    network = objective.linearize_outputs(x, taps=False)
    outputs, push = network.outputs, network.push
    curves = objective.curves(outputs, weights, rows)

    def model(directions: list) -> tuple:
        Q = fisher_gram(curves, outputs, [push(v) for v in directions])
        damped = [[r * a for r, a in zip(ridge, v, strict=True)] for v in directions]
        Q = Q + ops.stack(
            [ops.stack([vectors.dot(u, v) for v in directions]) for u in damped]
        )
        return Q, ops.stack([vectors.dot(v, gradient) for v in directions])

    return model
