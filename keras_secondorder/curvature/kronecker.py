"""A Kronecker-factored block: `F = A (x) G` for one affine layer."""

from collections.abc import Callable

from keras import ops

from keras_secondorder.autodiff import spd_inverses
from keras_secondorder.capture import Block

# pi outside this range says that a factor vanishes, not that it is small.
PI_RANGE = (1e-6, 1e6)
FLOAT32_EPS = 1.2e-7


def running_average(old, new, count, max_decay: float):
    """`eps old + (1 - eps) new` with `eps = min(1 - 1 / count, max_decay)`.

    With `count = 1` at the first batch the average starts as that batch's value.

    Args:
        old: The average so far.
        new: The value of this batch.
        count: Number of batches, this one included; a float scalar.
        max_decay: The largest weight of the past.

    References:
        Martens (2016), thesis, section 6.5.
    """
    eps = ops.minimum(1.0 - 1.0 / count, max_decay)
    return eps * old + (1.0 - eps) * new


def trace_norm_pi(A, G):
    """`pi = sqrt((tr A / d_in) / (tr G / d_out))`, bounded where a trace is zero.

    `d_in` counts the bias. The factored damping adds `pi gamma` to A and `gamma / pi`
    to G.

    References:
        Martens (2016), thesis, section 6.6.3.
    """
    mean_a = ops.trace(A) / A.shape[0]
    mean_g = ops.trace(G) / G.shape[0]
    tiny = 1e-30
    ratio = ops.sqrt(ops.maximum(mean_a, tiny) / ops.maximum(mean_g, tiny))
    return ops.clip(ratio, *PI_RANGE)


def damped_inverses(factors: list, dampings: list, compiled: bool = False) -> list:
    """`(factor + damping I)^-1`, at a scale where float32 has digits to spare.

    A matrix is divided by its mean eigenvalue first. Damping below what rounding does
    to the largest eigenvalue would be lost, so it is raised to that.

    Args:
        factors: Symmetric positive semi-definite matrices, shape `(d, d)` each.
        dampings: A positive scalar for each.
        compiled: Whether the step runs inside XLA.

    Returns:
        The inverses; NaN throughout where a factorisation failed.
    """
    scaled, scales = [], []
    for factor, damping in zip(factors, dampings, strict=True):
        d, trace = factor.shape[0], ops.trace(factor)
        damping = ops.maximum(damping, FLOAT32_EPS * trace)
        scale = trace / d + damping
        identity = ops.eye(d, dtype=factor.dtype)
        scaled.append((factor + damping * identity) / scale)
        scales.append(scale)
    inverses = spd_inverses(scaled, compiled)
    return [i / scale for i, scale in zip(inverses, scales, strict=True)]


class KroneckerBlock:
    """The block of one affine layer, `F = A (x) G` for `W` of shape (d_in, d_out).

    ```
    A = E[a a^T],   G = E[g g^T]
    U = (A + pi gamma I)^-1 V (G + gamma / pi I)^-1
    ```

    Args:
        plan: The block's entry in the plan; it has a wrapper.
        add_variable: The optimizer's `add_variable`.

    References:
        Martens (2016), thesis, sections 6.3 to 6.6; Martens & Grosse (2015).
    """

    def __init__(self, plan: Block, add_variable: Callable):
        self.variables = plan.variables
        self.wrapper = plan.wrapper
        name, sides = plan.layer_name, (plan.wrapper.d_in, plan.wrapper.d_out)

        def square(side, what):
            return add_variable(
                (side, side),
                initializer="zeros",
                dtype="float32",
                name=f"{name}_{what}",
            )

        self.A, self.G = (square(d, w) for d, w in zip(sides, "AG", strict=True))
        self.A_inverse, self.G_inverse = (
            square(d, f"{w}_inverse") for d, w in zip(sides, "AG", strict=True)
        )

    @property
    def factors(self) -> list:
        """The running statistics, variables `[A, G]`."""
        return [self.A, self.G]

    @property
    def inverses(self) -> list:
        """The cached inverses of the damped factors, variables."""
        return [self.A_inverse, self.G_inverse]

    def input_factor(self, inputs, weights):
        """`A` of one batch.

        Args:
            inputs: The layer's input, as recorded.
            weights: Weights `(examples, positions)` that sum to 1, or `(examples, 1)`.
        """
        a = self.wrapper.input_rows(inputs)  # (N, T, d_in)
        positions = ops.shape(a)[1]
        if weights.shape[1] == 1:
            weights = weights / ops.cast(positions, "float32")
        a = a * ops.sqrt(weights)[..., None]
        a = ops.reshape(a, (-1, a.shape[-1]))
        return ops.matmul(ops.transpose(a), a)

    def gradient_factor(self, gradient):
        """`G` of one batch, from gradients that carry the square root of the weight."""
        g = self.wrapper.gradient_rows(gradient)
        g = ops.reshape(g, (-1, g.shape[-1]))
        return ops.matmul(ops.transpose(g), g)

    def dampings(self, A, G, gamma, eta: float) -> list:
        """What factored Tikhonov damping adds to each factor, `[pi gamma, gamma / pi]`.

        Args:
            A: Input factor.
            G: Gradient factor.
            gamma: The factored damping, a scalar.
            eta: Curvature of the L2 penalty on this layer, added to `gamma^2`.
        """
        gamma = ops.sqrt(gamma**2 + eta)
        pi = trace_norm_pi(A, G)
        return [pi * gamma, gamma / pi]

    def precondition(self, gradient: list, inverses: list, damping, rows=None) -> list:
        """`A^-1 V G^-1` for the gradient of this block.

        Args:
            gradient: Tensors shaped like the block's variables.
            inverses: `[A^-1, G^-1]`.
            damping: Not used: the damping is in the inverses.
            rows: `(a, g)` with `V = a^T g`, where that is cheaper (thesis, end of 6.8).

        Returns:
            Tensors shaped like the block's variables.
        """
        A_inverse, G_inverse = inverses
        if rows is not None:
            a, g = rows
            U = ops.matmul(
                ops.transpose(ops.matmul(a, A_inverse)), ops.matmul(g, G_inverse)
            )
        else:
            V = self.wrapper.to_matrix(gradient)
            U = ops.matmul(ops.matmul(A_inverse, V), G_inverse)
        return self.wrapper.from_matrix(U)

    def rows(self, inputs, taps):
        """`(a, g)` with gradient `a^T g`, where preconditioning them is cheaper.

        Args:
            inputs: The layer's input, as recorded.
            taps: The gradient at its pre-activation, or None where it is not known.

        Returns:
            Two matrices with one row for each example and position, or None.
        """
        # A penalty's gradient is not of this form.
        if taps is None or any(v.regularizer is not None for v in self.variables):
            return None
        a, g = self.wrapper.input_rows(inputs), self.wrapper.gradient_rows(taps)
        examples, positions = a.shape[:2]
        known = examples is not None and positions is not None
        rows = examples * positions if known else None
        if not self.low_rank_pays(rows):
            return None
        return ops.reshape(a, (rows, a.shape[-1])), ops.reshape(g, (rows, g.shape[-1]))

    def low_rank_pays(self, rows: int | None) -> bool:
        """Whether `precondition` is cheaper from rows than from the gradient."""
        if rows is None:
            return False
        d_in, d_out = self.wrapper.d_in, self.wrapper.d_out
        from_gradient = d_in * d_out * (d_in + d_out)
        return rows * (d_in**2 + d_out**2 + d_in * d_out) < from_gradient
