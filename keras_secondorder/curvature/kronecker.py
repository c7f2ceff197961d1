"""A Kronecker-factored block: `F = A (x) G` for each affine map of a layer."""

from collections.abc import Callable

from keras import ops

from keras_secondorder import vectors
from keras_secondorder.capture import Block, Side
from keras_secondorder.capture.dense import DenseWrapper
from keras_secondorder.curvature.factor import (
    counts,
    in_units_of,
    inverse_of,
    mean_eigenvalue,
    multiply_left,
    multiply_right,
    second_moment,
    trace_norm_pi,
    zeros_of,
)
from keras_secondorder.curvature.low_rank import LowRank, Subspace
from keras_secondorder.curvature.rows import all_rows, gradient_rows, input_rows, spread

SHARINGS = ("expand", "reduce")


class KroneckerBlock:
    """The block of one layer, `F = A (x) G` for `W` of shape (d_in, d_out).

    ```
    A = E[a a^T],   G = E[g g^T]
    U = (A + pi gamma I)^-1 V (G + gamma / pi I)^-1
    ```

    Where a layer uses its weights at several positions (time steps, patches, calls),
    `A` is a mean and `G` a sum over the positions ("expand"), or `a` is averaged and
    `g` summed over the positions first ("reduce"). Both are exact for one position.

    A layer that is several affine maps has a pair of factors for each, and one with
    groups of features a stack of matrices in the place of each factor. The inverse of a
    large factor is a `LowRank` one, where the plan says so.

    Args:
        plan: The block's entry in the plan; it has a wrapper.
        add_variable: The optimizer's `add_variable`.
        sharing: "expand" or "reduce".

    References:
        Martens (2016), thesis, sections 6.3 to 6.6; Martens & Grosse (2015). Grosse &
        Martens (2016), section 3, for convolutions; their sums over positions in A and
        means in G have the same product, and the same damping through pi. Eschenhagen
        et al. (2023), sections 3.1 and 3.2, for "expand" and "reduce".
    """

    #: What is kept of each factor, for the names of the variables.
    kept = "inverse"
    #: Whether `inverses` are those of the damped `moments`.
    inverts_moments = True
    #: Whether a number for each weight is kept besides, which the memory plan counts.
    has_eigenvalues = False
    #: Whether `gamma^2` is in units of the block's mean eigenvalue.
    relative = False

    def __init__(self, plan: Block, add_variable: Callable, sharing: str = "expand"):
        self.variables = plan.variables
        self.wrapper = plan.wrapper
        self.successor = plan.successor
        self.parts = plan.wrapper.parts
        self.sides = plan.sides
        self._sharing = sharing
        self._is_plain = plan.is_plain

        def variables(which, what):
            return [
                zeros_of(pair[which], add_variable, f"{plan.layer_name}_{what}{suffix}")
                for pair, suffix in zip(self.sides, self._suffixes, strict=True)
            ]

        self._A, self._G = variables(0, "A"), variables(1, "G")
        self._kept = [
            variable
            for which, factor in enumerate("AG")
            for pair, suffix in zip(self.sides, self._suffixes, strict=True)
            for variable in inverse_of(
                pair[which],
                add_variable,
                f"{plan.layer_name}_{factor}_{self.kept}{suffix}",
            )
        ]

    @property
    def _suffixes(self) -> list:
        count = len(self.parts)
        return [""] if count == 1 else [f"_{i}" for i in range(count)]

    @property
    def A(self):  # noqa: N802
        """The input factor of the (first) affine map, a variable."""
        return self._A[0]

    @property
    def G(self):  # noqa: N802
        """The gradient factor of the (first) affine map, a variable."""
        return self._G[0]

    @property
    def factors(self) -> list:
        """The running statistics, variables `[A, G]`; all A first for several maps."""
        return self.moments

    @property
    def moments(self) -> list:
        """The second moments among the statistics, `[A, G]`, in any form of block."""
        return [*self._A, *self._G]

    @property
    def inverses(self) -> list:
        """The cached inverses of the damped factors, variables in the same order.

        A `LowRank` one is three of them.
        """
        return self._kept

    def by_factor(self, inverses: list) -> list:
        """One inverse for each factor, from the values of `inverses`."""
        rest = iter(inverses)
        sides = [pair[which] for which in range(2) for pair in self.sides]
        return [
            LowRank(next(rest), next(rest), next(rest)) if side.rank else next(rest)
            for side in sides
        ]

    # --- statistics -----------------------------------------------------------------

    def input_statistics(self, inputs: list, weights) -> list:
        """`A` of one batch, for each affine map.

        Args:
            inputs: The layer's inputs as recorded, one for each call.
            weights: Weights `(examples, positions)` that sum to 1, or `(examples, 1)`.
        """
        return [
            self._input_factor(part, pair[0], inputs, weights)
            for part, pair in zip(self.parts, self.sides, strict=True)
        ]

    def _input_factor(self, part, side, inputs, weights):
        a = input_rows(part, inputs, weights)
        if part.one_hot:
            w = spread(weights, a)
            return counts(a[..., 0], ops.broadcast_to(w, ops.shape(a)[:2]), side)
        if self._sharing == "reduce":
            a = ops.mean(a, axis=-2, keepdims=True)
        a = a * ops.sqrt(spread(weights, a))[..., None]
        return second_moment(all_rows(a, part.stack), side)

    def gradient_statistics(self, inputs: list, taps: list, weights) -> list:
        """`G` of one batch, for each affine map.

        Args:
            inputs: Not used.
            taps: Gradients at the pre-activations, one for each call, that carry the
                square root of the weight.
            weights: Weights of the examples; only their number is used.
        """
        return [
            self._gradient_factor(part, pair[1], taps, weights)
            for part, pair in zip(self.parts, self.sides, strict=True)
        ]

    def _gradient_factor(self, part, side, taps, weights):
        g = gradient_rows(part, taps, weights)
        if self._sharing == "reduce" and not part.one_hot:
            g = ops.sum(g, axis=-2, keepdims=True)
        return second_moment(all_rows(g, part.stack), side)

    # --- inverses -------------------------------------------------------------------

    def dampings(self, A, G, gamma, eta: float, part: int = 0) -> list:
        """What factored Tikhonov damping adds to each factor, `[pi gamma, gamma / pi]`.

        Args:
            A: Input factor.
            G: Gradient factor.
            gamma: The factored damping, a scalar.
            eta: Curvature of the L2 penalty on this layer, added to `gamma^2`.
            part: Which affine map.
        """
        gamma = ops.sqrt(gamma**2 + eta)
        pi = trace_norm_pi(A, G, self.sides[part])
        return [pi * gamma, gamma / pi]

    def damping(self, damping):
        """`lambda` of this block, a scalar."""
        return self._damping(vectors.values(self.moments), damping)

    def _damping(self, moments, damping):
        """One for all affine maps and groups: the mean of theirs, if relative."""
        if not self.relative:
            return damping
        count, means = len(self.parts), 0.0
        for i, sides in enumerate(self.sides):
            pair = zip((moments[i], moments[count + i]), sides, strict=True)
            mean_a, mean_g = (mean_eigenvalue(factor, side) for factor, side in pair)
            means = means + ops.mean(mean_a * mean_g)
        return in_units_of(means / count, damping, True)

    def systems(self, factors: list, gamma, eta: float) -> tuple:
        """`(matrices, dampings)` whose damped inverses are this block's `inverses`."""
        dampings = self.dampings_of(factors, gamma, eta)
        before = self.by_factor(vectors.values(self._kept))
        factors = [
            Subspace(factor, old.basis) if isinstance(old, LowRank) else factor
            for factor, old in zip(factors, before, strict=True)
        ]
        return factors, dampings

    def dampings_of(self, moments: list, gamma, eta: float) -> list:
        """What factored damping adds to each of the values of `moments`."""
        count, gamma = len(self.parts), ops.sqrt(self._damping(moments, gamma**2))
        pairs = [
            self.dampings(moments[i], moments[count + i], gamma, eta, i)
            for i in range(count)
        ]
        return [p[0] for p in pairs] + [p[1] for p in pairs]

    def precondition(self, gradient: list, inverses: list, damping, rows=None) -> list:
        """`A^-1 V G^-1` for the gradient of this block.

        Args:
            gradient: Tensors shaped like the block's variables.
            inverses: Values of `inverses`.
            damping: Not used: the damping is in the inverses.
            rows: `(a, g)` whose `a^T g` is the gradient of the loss, where that is
                cheaper (thesis, end of 6.8).

        Returns:
            Tensors shaped like the block's variables.
        """
        pair = self.by_factor(inverses)
        if rows is None:
            return self._product(gradient, pair)
        a, g = (
            multiply_right(r, inverse, side)
            for r, inverse, side in zip(rows, pair, self.sides[0], strict=True)
        )
        return self.wrapper.from_product(a, g)

    def _product(self, V: list, matrices: list) -> list:
        """`A V G` for whatever stands in the place of the factors."""
        count, results = len(self.parts), []
        for i, values in enumerate(self.wrapper.split(V)):
            part, (side_a, side_g) = self.parts[i], self.sides[i]
            left, right = matrices[i], matrices[count + i]
            if type(part) is DenseWrapper and isinstance(left, LowRank):
                results.append(_by_rows(values, left, right, side_g))
                continue
            U = multiply_left(left, part.to_matrix(values), side_a)
            results.append(part.from_matrix(multiply_right(U, right, side_g)))
        return self.wrapper.join(results)

    def multiply(self, v: list) -> list:
        """`A V G` with the running factors, for tensors shaped like the variables."""
        return self._product(v, vectors.values(self.moments))

    # --- a gradient that is known as rows -------------------------------------------

    def rows(self, inputs: list, taps: list):
        """`(a, g)` with the loss's gradient `a^T g`, where that is cheaper.

        Args:
            inputs: The layer's inputs as recorded, one for each call.
            taps: The gradients at its pre-activations; empty where not known.

        Returns:
            Two matrices with one row for each example and position, or None.
        """
        if not taps or not self.rows_pay(1):
            return None
        a = [self.wrapper.input_rows(x) for x in inputs]
        g = [self.wrapper.gradient_rows(t) for t in taps]
        known = all(None not in r.shape for r in a)
        rows = sum(r.shape[0] * r.shape[1] for r in a) if known else None
        if not self.rows_pay(rows):
            return None
        return tuple(
            ops.concatenate([ops.reshape(r, (-1, r.shape[-1])) for r in both], axis=0)
            for both in (a, g)
        )

    def rows_pay(self, rows) -> bool:
        """Whether `precondition` is cheaper from rows; not if unknown how many."""
        # The gradient of a penalty is no product of rows.
        penalized = any(v.regularizer is not None for v in self.variables)
        if not (isinstance(rows, int) and self._is_plain) or penalized:
            return False
        A, G = self.sides[0]
        from_gradient = A.size * G.product_cost + G.size * A.product_cost
        a_row = A.product_cost + G.product_cost + A.size * G.size
        return rows * a_row < from_gradient


def _by_rows(values: list, left, right, side: Side) -> list:
    """`A V G` of a dense layer, kernel and bias apart: both together are a copy."""
    rows = [ops.reshape(vectors.cast(v, "float32"), (-1, v.shape[-1])) for v in values]
    products = left.left(*(multiply_right(V, right, side) for V in rows))
    return [ops.reshape(u, v.shape) for u, v in zip(products, values, strict=True)]
