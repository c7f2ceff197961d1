"""Optimizers whose solvers see the parameters as one flat vector."""

import math

from keras import ops

from keras_secondorder import vectors
from keras_secondorder.optimizers.base import SecondOrderOptimizer


class FlatOptimizer(SecondOrderOptimizer):
    """Base class of optimizers that hand flat vectors of shape `(P,)` to a solver.

    They compute in the precision of the model's variables, float32 at least.
    """

    #: The layers that are watched during a step.
    wrappers: tuple = ()

    def build_state(self, model):
        """Remember the shapes of the parameters."""
        variables = model.trainable_variables
        self.precision = vectors.precision_of(variables)
        self._shapes = [tuple(v.shape) for v in variables]
        self.size = sum(math.prod(shape) for shape in self._shapes)

    def flatten(self, v: list):
        """A parameter-space vector as one flat tensor."""
        return vectors.flatten(v, self.precision)

    def unflatten(self, x) -> list:
        """A flat tensor as a parameter-space vector."""
        return vectors.unflatten(x, self._shapes)

    def loss_and_gradient(self, objective, linear) -> tuple:
        """`(h, flat gradient, whether both are finite)`."""
        loss = linear.outputs[0]
        gradient = self.flatten(objective.gradient(linear)[0])
        return loss, gradient, ops.isfinite(loss) & ops.all(ops.isfinite(gradient))
