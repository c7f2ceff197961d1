"""Any other loss, through its Hessian with respect to the outputs."""

import copy

import keras
from keras import ops

from keras_secondorder import autodiff
from keras_secondorder.likelihoods.base import Likelihood

MAX_DENSE_OUTPUTS = 64


def loss_values(loss, y, z):
    """The values of a loss at its positions, before any reduction.

    Args:
        loss: A Keras loss.
        y: Targets, of any dtype: as Keras does, they are converted to that of `z`.
        z: The outputs of the network.
    """
    return loss.call(ops.convert_to_tensor(y, dtype=z.dtype), z)


class OutputHessian(Likelihood):
    """A loss without a distribution: `H(z)` by autodiff in place of the Fisher matrix.

    Positions do not depend on one another; for those that do, see `OuterProduct`. Up to
    64 outputs the blocks are formed, and their negative eigenvalues are set to zero; a
    convex loss has them by rounding only. Of a position with more outputs, such as the
    whole batch where the loss returns one number, the blocks are those of its last
    axis; where that is longer, the loss must act on each output separately.

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

    def unprojected_product(self, z, v):
        """`H v`, shaped like `z`, whatever the signs of its eigenvalues."""
        shape = ops.shape(z) if self._shape is None else self._shape

        def total(primals):
            z = ops.reshape(primals[0], shape)
            return ops.sum(loss_values(self._loss, self._y, z))

        return autodiff.hessian_product(total, [z], [v])[0]

    def _root(self, z):
        """`(diagonal, None)` or `(eigenvectors, sqrt(eigenvalues))` of every block."""
        width = z.shape[-1]
        if width > MAX_DENSE_OUTPUTS:
            diagonal = self.unprojected_product(z, ops.ones_like(z))
            return ops.sqrt(ops.maximum(diagonal, 0.0)), None
        columns = [
            self.unprojected_product(
                z, ops.broadcast_to(ops.one_hot(k, width), ops.shape(z))
            )
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
