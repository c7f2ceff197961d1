"""Any other loss, through its Hessian with respect to the outputs."""

import copy
import warnings

import keras
import numpy as np
from keras import ops

from keras_secondorder import autodiff
from keras_secondorder.likelihoods.base import Likelihood

MAX_DENSE_OUTPUTS = 64
# Rounding alone moves an eigenvalue of a float32 Hessian by about 1e-6 of the largest.
CONVEXITY_TOLERANCE = 1e-4
# The curvatures that need only derivatives of the whole objective.
WITHOUT_OUTPUT_HESSIAN = (
    "Use KFAC(fisher='empirical', damping=0.1), HessianFree(curvature='hessian') or "
    "NaturalGradient(metric='covariance')"
)


class OutputHessian(Likelihood):
    """A loss without a distribution: `H(z)` by autodiff in place of the Fisher matrix.

    Up to 64 outputs the blocks are formed, and their negative eigenvalues are set to
    zero; a convex loss has them by rounding only. Of a position with more outputs, such
    as the whole batch where the loss returns one number, the blocks are those of its
    last axis; where that is longer, the loss must act on each output separately.

    Args:
        loss: A Keras loss; its `call(y_true, y_pred)` gives one value a position.
        y: The targets of the batch.
        shape: Shape of the outputs as the loss takes them, where the verbs are given
            them in another one.
    """

    def __init__(self, loss, y, shape=None):
        self._loss = loss
        self._y = y
        self._shape = shape
        self._kept = None

    def _split(self, t):
        """Positions with many outputs as several, with the last axis of the loss."""
        width = t.shape[-1]
        last = width if self._shape is None else int(self._shape[-1])
        if width <= MAX_DENSE_OUTPUTS or last == width:
            return t
        return ops.reshape(t, (*ops.shape(t)[:-1], width // last, last))

    def _product(self, z, v):
        shape = ops.shape(z) if self._shape is None else self._shape

        def total(primals):
            return ops.sum(self._loss.call(self._y, ops.reshape(primals[0], shape)))

        return autodiff.hessian_product(total, [z], [v])[0]

    def _root(self, z):
        """`(diagonal, None)` or `(eigenvectors, sqrt(eigenvalues))` of every block."""
        width = z.shape[-1]
        if width > MAX_DENSE_OUTPUTS:
            diagonal = self._product(z, ops.ones_like(z))
            return ops.sqrt(ops.maximum(diagonal, 0.0)), None
        columns = [
            self._product(z, ops.broadcast_to(ops.one_hot(k, width), ops.shape(z)))
            for k in range(width)
        ]
        block = ops.stack(columns, axis=-1)  # (positions, D, D)
        block = (block + ops.swapaxes(block, -1, -2)) / 2
        # Not every backend takes a block with NaN apart; the roots carry it on.
        finite = ops.all(ops.isfinite(block), axis=(-1, -2), keepdims=True)
        block = ops.where(finite, block, ops.zeros_like(block))
        values, vectors = ops.linalg.eigh(block)
        roots = ops.sqrt(ops.maximum(values, 0.0))
        return vectors, ops.where(finite[..., 0], roots, float("nan"))

    def at(self, z):
        """The same loss, with what is common to all products at `z` computed once."""
        other = copy.copy(self)
        other._kept = self._root(self._split(z))
        return other

    def hessian_product(self, z, v):
        """`H(z) v`, with `H` projected on the positive semi-definite matrices."""
        shape, v = ops.shape(v), self._split(v)
        vectors, roots = self._kept or self._root(self._split(z))
        if roots is None:
            return ops.reshape(vectors**2 * v, shape)
        along = ops.sum(vectors * v[..., :, None], axis=-2)  # (positions, D)
        product = ops.sum(vectors * (roots**2 * along)[..., None, :], axis=-1)
        return ops.reshape(product, shape)

    def sqrt_product(self, z, u):
        """`V diag(sqrt(eigenvalues)) u`."""
        shape, u = ops.shape(u), self._split(u)
        vectors, roots = self._kept or self._root(self._split(z))
        if roots is None:
            return ops.reshape(vectors * u, shape)
        root = ops.sum(vectors * (roots * u)[..., None, :], axis=-1)
        return ops.reshape(root, shape)

    def sampled_sqrt(self, z, seed):
        """The square root times a standard normal vector."""
        noise = keras.random.normal(ops.shape(z), dtype=z.dtype, seed=seed)
        return self.sqrt_product(z, noise)


def check_convex(loss, target_rank: int, width: int) -> None:
    """Look at the Hessian of a loss: warn of what is projected, refuse what is wrong.

    The Hessian is formed at a few outputs and targets between 0 and 1, where losses
    on probabilities and losses on real numbers are both defined.

    Args:
        loss: A Keras loss.
        target_rank: Number of axes of the targets.
        width: Number of outputs, D.

    Raises:
        ValueError: It has coupled outputs and more than 64 of them.
    """
    positions, rng = 16, np.random.default_rng(0)
    shape = (positions,) + (1,) * max(target_rank - 2, 0) + (width,)
    draw = rng.uniform(0.05, 0.95, (2, *shape)).astype("float32")
    y = draw[0] / draw[0].sum(-1, keepdims=True) if width > 1 else draw[0]
    draw[1, positions // 2 :] = 3.0 * rng.normal(size=draw[1, positions // 2 :].shape)
    probes = min(width, MAX_DENSE_OUTPUTS)

    def hessian_columns():
        likelihood = OutputHessian(loss, ops.convert_to_tensor(y))
        z = ops.convert_to_tensor(draw[1])
        columns = []
        for k in range(probes):
            v = np.zeros(shape, "float32")
            v[..., k] = 1.0
            columns.append(
                ops.convert_to_numpy(likelihood._product(z, ops.convert_to_tensor(v)))
            )
        return columns

    block = np.stack(autodiff.eagerly(hessian_columns), -1)
    block = block.reshape(positions, width, probes)
    block = block[np.isfinite(block).all((1, 2))]  # outside of the loss's domain
    name = getattr(getattr(loss, "fn", None), "__name__", loss.name)
    if width > MAX_DENSE_OUTPUTS:
        off_diagonal = block * (1 - np.eye(width, probes))
        if np.abs(off_diagonal).max() > CONVEXITY_TOLERANCE * np.abs(block).max():
            raise ValueError(
                f"The loss '{name}' couples {width} outputs with one another, and "
                f"its Hessian is formed for at most {MAX_DENSE_OUTPUTS}. "
                f"{WITHOUT_OUTPUT_HESSIAN}."
            )
        values = block[:, np.arange(probes), np.arange(probes)]
    else:
        values = np.linalg.eigvalsh((block + block.swapaxes(-1, -2)) / 2)
    if not values.any():
        warnings.warn(
            f"The loss '{name}' is linear in the outputs of the model, in pieces: its "
            "Gauss-Newton and Fisher matrices are zero. Steps are then those of damped "
            "gradient descent. A loss such as Huber has curvature near its minimum.",
            stacklevel=2,
        )
    if values.min() < -CONVEXITY_TOLERANCE * np.abs(values).max():
        warnings.warn(
            f"The loss '{name}' is not convex in the outputs of the model: its Hessian "
            f"there has the eigenvalue {values.min():.3g}. The nearest positive "
            "semi-definite matrix is used in its place, with the negative eigenvalues "
            f"set to zero. {WITHOUT_OUTPUT_HESSIAN} to do without it.",
            stacklevel=2,
        )
