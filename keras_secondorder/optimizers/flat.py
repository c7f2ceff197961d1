"""Optimizers whose solvers see the parameters as one flat vector."""

import math
import warnings

import keras
from keras import ops

from keras_secondorder import vectors
from keras_secondorder.capture import all_layers
from keras_secondorder.optimizers.base import SecondOrderOptimizer

# After ten steps, this leaves a third of what moving statistics were at the start.
MOST_MOMENTUM = 0.9


class FlatOptimizer(SecondOrderOptimizer):
    """Base class of optimizers that hand flat vectors of shape `(P,)` to a solver.

    They compute in the precision of the model's variables, float32 at least.
    """

    #: The layers that are watched during a step.
    wrappers: tuple = ()

    def announce(self):
        """Warn once where moving statistics cannot follow few, large steps."""
        lagging, self._lagging = self._lagging, []
        if lagging:
            warnings.warn(
                f"{type(self).__name__} takes few, large steps, and the moving "
                f"statistics of {', '.join(lagging)} keep most of their old values at "
                "each. `evaluate` and `predict` may lag far behind training. Give "
                "BatchNormalization `momentum=0.5`.",
                stacklevel=2,
            )

    def build_state(self, model):
        """Remember the shapes of the parameters."""
        self._lagging = [
            layer.name
            for layer in all_layers(model)
            if isinstance(layer, keras.layers.BatchNormalization)
            and layer.trainable
            and layer.momentum > MOST_MOMENTUM
        ]
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
