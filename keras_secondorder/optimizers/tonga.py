"""TONGA: natural gradient with a low-rank covariance that is kept over steps."""

import math

import keras
from keras import ops

from keras_secondorder import vectors
from keras_secondorder.arguments import (
    check_at_least,
    check_count,
    check_one_of,
)
from keras_secondorder.curvature.factor import past_weight
from keras_secondorder.curvature.products import empirical_fisher_products
from keras_secondorder.likelihoods import CounterSeed
from keras_secondorder.optimizers.truncated_newton import Trial, TruncatedNewton

BLOCKS = ("variable", "unit", "full")


@keras.saving.register_keras_serializable(package="keras_secondorder")
class TONGA(TruncatedNewton):
    """Topmoumoute online natural gradient (Le Roux, Manzagol & Bengio).

    ```
    x_j   = sum_n r_nj sqrt(w_n) g_n / sqrt(columns)      # r_nj = +-1, n of the batch
    C     = eps C + (1 - eps) sum_j x_j x_j^T = X^T X,   eps = min(1 - 1/k, decay)
    X     = the `rank` largest s_i u_i^T of X             # every `interval` steps
    delta = -(X^T X + lambda I)^-1 g
    t     = backtracking line search along delta
    theta += learning_rate * t * delta
    lambda  follows  rho = (h(theta + t delta) - h(theta)) / M(t delta)
    ```

    `C` is the covariance of the gradients of single examples, block by block, from a
    few random combinations of them. It costs no products: `columns` reverse passes for
    a step, and `rank + interval * columns` copies of the parameters.

    Args:
        learning_rate: A number or a Keras schedule; 1 takes the step as found.
        damping: `lambda`: an `AdaptiveDamping`, a number or a schedule. "auto" is
            `AdaptiveDamping(None, every=1, decay=2/3, minimum=1e-6)`.
        rank: Eigenvectors that are kept of each block.
        interval: Steps between two eigen-decompositions.
        columns: Random combinations of the gradients of a batch.
        blocks: "variable", one for each variable; "unit", one for each index of its
            last axis, which are the incoming weights of a unit; or "full".
        centered: Whether the mean gradient is taken out.
        decay: Largest weight of the past in the average, in [0, 1).
        selection_fraction: Share of the batch for line search and reduction ratio.
        seed: Seed of the signs.
        **kwargs: Keras's shared arguments.

    Raises:
        ValueError: Arguments out of range.

    Example:
        >>> import keras, keras_secondorder as kso
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile(optimizer=kso.TONGA(), loss="mse")
        >>> x = keras.random.normal((64, 4), seed=0)
        >>> history = model.fit(x, x[:, :1], batch_size=64, epochs=30, verbose=0)
        >>> history.history["loss"][-1] < 1e-2 * history.history["loss"][0]
        True

    References:
        Le Roux, Manzagol & Bengio (2008), sections 3 and 4; Pascanu & Bengio (2014),
        section 4.1; Martens (2016), thesis, section 6.11. They add the gradient of a
        mini-batch to `X` at each step, with a constant `lambda` and no line search;
        here it is random combinations of the gradients of its examples, whose second
        moment is the covariance, so that the size of the batch does not scale it.
    """

    def __init__(
        self,
        learning_rate=1.0,
        damping="auto",
        rank: int = 8,
        interval: int = 8,
        columns: int = 4,
        blocks: str = "variable",
        centered: bool = True,
        decay: float = 0.95,
        selection_fraction: float = 1.0,
        seed: int = 0,
        **kwargs,
    ):
        check_one_of("blocks", blocks, BLOCKS)
        check_count("rank", rank)
        check_count("interval", interval)
        check_count("columns", columns)
        check_at_least("decay", decay, 0, 1 - 1e-7)
        super().__init__(learning_rate, damping, selection_fraction, **kwargs)
        self.rank = rank
        self.interval = interval
        self.columns = columns
        self.blocks = blocks
        self.centered = centered
        self.decay = decay
        self.seed = seed

    def build_state(self, model):
        """Create `X`: the rows that are kept, then those of the steps since."""
        super().build_state(model)
        rows = self.rank + self.interval * self.columns
        self.X = self.add_variable((rows, self.size), "zeros", self.precision, name="X")

    def propose(self, objective, linear, gradient, damping, k) -> Trial:
        """The natural gradient, from the covariance up to this batch."""
        X = self._with_batch(objective, k)
        step = -self._solve(X, gradient, damping)
        slope = ops.sum(gradient * step)  # and step^T (C + lambda I) step = -slope
        change = self.change_of(objective)
        damped = damping * ops.sum(step * step)
        return Trial(step, slope, -slope, damped, change, {}, ((self.X, X),))

    def _with_batch(self, objective, k):
        """`X` of this step."""
        (X,) = vectors.values([self.X])
        slot = k % self.interval
        X = ops.cond(ops.equal(slot, 0), lambda: self._largest(X), lambda: X)
        covariance = empirical_fisher_products(objective, self.centered)
        random = CounterSeed(self.seed, k, stream=3)
        new = []
        for _ in range(self.columns):
            draw = keras.random.uniform((objective.examples,), seed=random)
            signs = ops.cast(ops.where(draw < 0.5, -1.0, 1.0), self.precision)
            new.append(self.flatten(covariance.root([signs])))
        new = ops.stack(new) / self.columns**0.5
        # Squares are averaged, so the rows take the roots of the weights.
        count = ops.cast(k + 1, self.precision)
        eps = past_weight(count, self.decay)
        first = self.rank + slot * self.columns
        place = ops.arange(self.X.shape[0], dtype="int32") - first  # (rows,)
        taken = ops.take(new, ops.clip(place, 0, self.columns - 1), axis=0)
        is_new = ops.expand_dims((place >= 0) & (place < self.columns), 1)
        return ops.where(is_new, ops.sqrt(1.0 - eps) * taken, ops.sqrt(eps) * X)

    def _by_block(self, X) -> list:
        """The blocks of some rows: shapes `(rows, width, units)`."""
        if self.blocks == "full":
            return [ops.expand_dims(X, 2)]
        parts, start = [], 0
        for shape in self._shapes:
            size = math.prod(shape)
            units = shape[-1] if self.blocks == "unit" and shape else 1
            part = X[:, start : start + size]
            parts.append(ops.reshape(part, (-1, size // units, units)))
            start += size
        return parts

    def _joined(self, parts: list):
        """The inverse of `_by_block`."""
        return ops.concatenate(
            [ops.reshape(p, (-1, p.shape[1] * p.shape[2])) for p in parts], axis=1
        )

    def _largest(self, X):
        """The largest principal components of the rows, and zeros."""
        parts = []
        for rows in self._by_block(X):
            _, V = _principal(rows)
            kept = ops.einsum("uck,cwu->kwu", V[:, :, -self.rank :], rows)
            parts.append(kept)
        kept = self._joined(parts)
        return ops.concatenate([kept, ops.zeros_like(X[self.rank :])])

    def _solve(self, X, g, damping):
        """`(X^T X + lambda I)^-1 g = (g - X^T (X X^T + lambda I)^-1 X g) / lambda`."""
        parts = []
        gradients = self._by_block(ops.expand_dims(g, 0))
        for rows, part in zip(self._by_block(X), gradients, strict=True):
            # Not a linear solve: some backends raise where rounding makes it singular.
            e, V = _principal(rows)
            b = ops.einsum("cwu,uck->ukw", rows, V)
            b = ops.einsum("ukw,xwu->uk", b, part) / (ops.relu(e) + damping)
            inner = ops.einsum("uck,uk->uc", V, b)
            parts.append((part - ops.einsum("cwu,uc->wu", rows, inner)) / damping)
        return self._joined(parts)[0]


def _principal(rows):
    """Eigenvalues, ascending, and eigenvectors of `X X^T` of each unit.

    Of a step that will be skipped, for not being finite, they are those of zero.
    """
    gram = ops.einsum("cwu,ewu->uce", rows, rows)
    finite = ops.all(ops.isfinite(gram))
    return ops.linalg.eigh(ops.where(finite, gram, ops.zeros_like(gram)))
