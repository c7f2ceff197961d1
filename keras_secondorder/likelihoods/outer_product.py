"""A loss whose outputs are coupled: the outer product of its own gradient."""

import copy

from keras import ops

from keras_secondorder import autodiff
from keras_secondorder.likelihoods.base import Likelihood
from keras_secondorder.likelihoods.output_hessian import loss_values


class OuterProduct(Likelihood):
    """`g g^T` of the loss's gradient `g`, in place of an output Hessian.

    It is for losses whose Hessian has no small blocks, such as contrastive ones, Dice
    or CTC. `g` is the gradient of the sum of the loss's values at the outputs of one
    position; where the loss is one number for the whole batch, at those of one example,
    times the root of their number. Pulled back, it is the empirical Fisher matrix.

    Args:
        loss: A Keras loss.
        y: The targets of the batch.
        shape: Shape of the outputs as the loss takes them.
    """

    def __init__(self, loss, y, shape):
        self._loss = loss
        self._y = y
        self._shape = shape
        self._kept = None

    def _gradient(self, z):
        """`g` with the outputs that belong together on the last axis."""
        if self._kept is not None:
            return self._kept

        def total(primals, tap):
            outputs = ops.reshape(primals[0], self._shape)
            return [ops.sum(loss_values(self._loss, self._y, outputs))], ()

        linear = autodiff.vjp(total, [z], taps=False)
        g = ops.stop_gradient(linear.pullback([ops.ones_like(linear.outputs[0])])[0])
        if len(z.shape) > 1:
            return g
        examples = self._shape[0]
        return ops.sqrt(ops.cast(examples, g.dtype)) * ops.reshape(g, (examples, -1))

    def at(self, z):
        """The same loss, with its gradient at `z` computed once."""
        other = copy.copy(self)
        other._kept = self._gradient(z)
        return other

    def hessian_product(self, z, v):
        """`g (g . v)`."""
        g = self._gradient(z)
        along = ops.sum(g * ops.reshape(v, ops.shape(g)), axis=-1, keepdims=True)
        return ops.reshape(g * along, ops.shape(v))

    def sqrt_product(self, z, u):
        """`g u_1`: the square root has one column that is not zero."""
        g = self._gradient(z)
        return ops.reshape(g * ops.reshape(u, ops.shape(g))[..., :1], ops.shape(u))

    def sampled_sqrt(self, z, seed):
        """`g` itself."""
        return ops.reshape(self._gradient(z), ops.shape(z))
