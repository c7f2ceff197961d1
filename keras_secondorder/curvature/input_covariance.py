"""The mean and the covariance of what goes into a layer."""

from collections.abc import Callable

from keras import ops

from keras_secondorder import vectors
from keras_secondorder.capture import Side
from keras_secondorder.curvature.factor import (
    TINY,
    multiply_left,
    running_average,
    second_moment,
    zeros_of,
)
from keras_secondorder.curvature.rows import all_rows, gradient_rows, input_rows, spread


def input_mean(part, inputs: list, weights):
    """The mean input of an affine map over examples and positions.

    Args:
        part: The map's wrapper.
        inputs: The layer's inputs as recorded, one for each call.
        weights: Weights `(examples, positions)` that sum to 1, or `(examples, 1)`.

    Returns:
        Shape `(d_in,)`, or `(stack, d_in)`; with a bias, the last entry is 1.
    """
    return _mean(*_weighted(part, inputs, weights))


def center(W, mean, has_bias: bool):
    """The gradient for a bias that sits at the mean input, `s = (a - mean) K + c`.

    ```
    K: dW_K - mean db^T = E[(a - mean) g^T],    c: db = E[g]
    ```

    Without a bias there is nothing to move, and the gradient stays as it is.

    Args:
        W: The gradient, shape `(d_in, d_out)`, its last row that of the bias.
        mean: The mean input, shape `(d_in,)`.
        has_bias: Whether there is a bias.

    References:
        George (2017), section 6.3.
    """
    if not has_bias:
        return W
    db = W[..., -1:, :]
    return ops.concatenate([W[..., :-1, :] - mean[..., :-1, None] * db, db], axis=-2)


def uncenter(W, mean, has_bias: bool):
    """The step of `[K; b]` from that of `[K; c]`: `b = c - mean K`.

    Args:
        W: The step, its last row that of `c`.
        mean: The mean input, with which `center` was called.
        has_bias: Whether there is a bias.

    References:
        George (2017), section 6.3.4.
    """
    if not has_bias:
        return W
    K, c = W[..., :-1, :], W[..., -1:, :]
    b = c - ops.sum(mean[..., :-1, None] * K, axis=-2, keepdims=True)
    return ops.concatenate([K, b], axis=-2)


class InputCovariance:
    """`F = C (x) alpha I` for one affine map, with `C` the covariance of its input.

    ```
    C     = E[(a - mean) (a - mean)^T]                 # running averages
    alpha = max over units of E[g_i^2],  or a number
    U_K   = 1 / alpha (C + damping / alpha I)^-1 V_K
    u_c   = v_c / (alpha + damping)
    ```

    Args:
        part: The map's wrapper; its input is not one-hot.
        add_variable: The optimizer's `add_variable`.
        name: Start of the names of the variables.
        max_factor_size: `C` is diagonal where it has more rows.

    References:
        George (2017), section 6.4.2.
    """

    def __init__(self, part, add_variable: Callable, name: str, max_factor_size: int):
        self.part = part
        size = part.d_in - part.has_bias
        self.side = Side(part.stack, size, size if size > max_factor_size else 1)
        lead = () if part.stack == 1 else (part.stack,)
        self.mean = add_variable((*lead, part.d_in), "zeros", name=f"{name}_mean")
        self.moment = zeros_of(self.side, add_variable, f"{name}_moment")
        self.inverse = zeros_of(self.side, add_variable, f"{name}_inverse")
        self.alpha = add_variable((), "zeros", name=f"{name}_alpha")

    @property
    def variables(self) -> list:
        """The mean, the second moment, alpha and the inverse."""
        return [self.mean, self.moment, self.alpha, self.inverse]

    def averaged(self, inputs, taps, weights, count, decay, alpha) -> list:
        """New values of the mean, the moment and alpha from one more batch.

        Args:
            inputs: The layer's inputs as recorded, one for each call.
            taps: Gradients of the loss at its pre-activations, one for each call.
            weights: Weights `(examples, positions)` that sum to 1, or `(examples, 1)`.
            count: Number of batches, this one included; a float scalar.
            decay: Largest weight of the past.
            alpha: A number, or None for the largest mean square.
        """
        a, w = _weighted(self.part, inputs, weights)
        rows = a[..., :-1] if self.part.has_bias else a
        rows = all_rows(rows * ops.sqrt(w)[..., None], self.part.stack)
        batch = [
            _mean(a, w),
            second_moment(rows, self.side),
            self._largest(taps, weights) if alpha is None else ops.cast(alpha, a.dtype),
        ]
        old = vectors.values(self.variables)
        return [
            running_average(o, n, count, decay)
            for o, n in zip(old[:3], batch, strict=True)
        ]

    def system(self, mean, moment, alpha, damping) -> tuple:
        """`(C, damping / alpha)`, the matrix whose damped inverse is wanted.

        Args:
            mean: The mean input.
            moment: Its second moment.
            alpha: The gradient's scale.
            damping: Tikhonov damping, a scalar.
        """
        shift = damping / ops.maximum(alpha, TINY)
        if self.part.stack > 1:
            shift = ops.broadcast_to(shift, (self.part.stack,))
        if not self.part.has_bias:
            return moment, shift
        lead = () if self.part.stack == 1 else (self.part.stack,)
        row = ops.reshape(mean[..., :-1], (*lead, 1, self.side.size))
        return moment - second_moment(row, self.side), shift

    def _largest(self, taps, weights):
        """The largest mean square, over units, of the gradients of single examples."""
        g = gradient_rows(self.part, taps, weights)  # each times its weight
        w = ops.sum(weights, axis=1)[:, None]
        squares = ops.divide_no_nan(ops.sum(g**2, axis=-2), w)
        return ops.max(ops.sum(squares, axis=-2))

    def precondition(self, W, damping, mean):
        """`U` of a gradient `W`, shape `(d_in, d_out)`, the bias included.

        Args:
            W: The gradient.
            damping: Tikhonov damping, a scalar.
            mean: The mean input that the bias sits at, shape `(d_in,)`.
        """
        _, _, alpha, inverse = vectors.values(self.variables)
        alpha = ops.maximum(alpha, TINY)
        W = center(W, mean, self.part.has_bias)
        if not self.part.has_bias:
            return multiply_left(inverse, W, self.side) / alpha
        K = multiply_left(inverse, W[..., :-1, :], self.side)
        c = W[..., -1:, :] / (alpha + damping)
        return uncenter(ops.concatenate([K / alpha, c], axis=-2), mean, True)


def _weighted(part, inputs, weights):
    """All rows `(..., N, T, d_in)` and their weights `(N, T)`, which sum to 1."""
    a = input_rows(part, inputs, weights)
    return a, ops.broadcast_to(spread(weights, a), ops.shape(a)[-3:-1])


def _mean(rows, weights):
    return ops.sum(rows * weights[..., None], axis=(-3, -2))
