"""Optimizers that need gradients only, and so work in any training loop."""

import types

import keras
from keras import ops

from keras_secondorder import vectors


class FirstOrderOptimizer(keras.optimizers.Optimizer):
    """Base class: a plain Keras optimizer that leaves batches of NaN out.

    Args:
        learning_rate: As in Keras.
        **kwargs: Keras's shared optimizer arguments.
    """

    def __init__(self, learning_rate=1.0, **kwargs):
        super().__init__(learning_rate=learning_rate, **kwargs)

    def build(self, variables):
        """Remember which parameters there are."""
        super().build(variables)
        # Keras would take the entries of a list for variables of the optimizer's own.
        self._built_for = types.SimpleNamespace(parameters=list(variables))

    def place_of(self, variable) -> int:
        """Number of a parameter among those that the optimizer was built for."""
        # On TensorFlow it comes as the backend's own variable.
        return next(
            i
            for i, v in enumerate(self._built_for.parameters)
            if v is variable or v.value is variable
        )

    def add_slots(self, variables, name: str, value: float) -> list:
        """One variable of the optimizer for each parameter, filled with a number."""
        initializer = keras.initializers.Constant(value)
        return [
            self.add_variable_from_reference(v, name=name, initializer=initializer)
            for v in variables
        ]

    def apply(self, grads, trainable_variables=None):
        """Apply a step, or change nothing where a gradient is not finite."""
        grads = list(grads)
        if not self.built and trainable_variables is not None:
            self.build(trainable_variables)
        finite = vectors.is_finite([g for g in grads if g is not None])
        state = [*self._built_for.parameters, *self.variables]
        # Copies: PyTorch assigns in place.
        before = [ops.copy(value) for value in vectors.values(state)]
        super().apply(grads, trainable_variables)
        after = vectors.values(state)
        for variable, old, new in zip(state, before, after, strict=True):
            variable.assign(ops.where(finite, new, old))
