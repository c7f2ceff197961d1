"""Optimizers that need gradients only, and so work in any training loop."""

import types

import keras
from keras import ops

from keras_secondorder import vectors
from keras_secondorder.optimizers.base import SecondOrderOptimizer, StepResult


class FirstOrderOptimizer(SecondOrderOptimizer):
    """Base class: the gradient is the direction, and batches of NaN are left out.

    In the training loop of this package they leave moving statistics and metrics as
    they were, too. Another loop has changed those by the time it calls `apply`.
    """

    needs_model = False
    #: No layer is watched during a step.
    wrappers: tuple = ()

    def build(self, variables):
        """Remember which parameters there are."""
        if not self.built:
            # Keras would take the entries of a list for variables of the optimizer's.
            self._built_for = types.SimpleNamespace(parameters=list(variables))
            self.precision = vectors.precision_of(variables)
        super().build(variables)

    def place_of(self, variable) -> int:
        """Number of a parameter among those that the optimizer was built for."""
        # On TensorFlow it comes as the backend's own variable.
        return next(
            i
            for i, v in enumerate(self._built_for.parameters)
            if v is variable or v.value is variable
        )

    def add_slots(self, name: str, value: float) -> list:
        """One variable of the optimizer for each parameter, filled with a number."""
        initializer = keras.initializers.Constant(value)
        return [
            self.add_variable_from_reference(v, name=name, initializer=initializer)
            for v in self._built_for.parameters
        ]

    def step(self, objective) -> StepResult:
        """The gradient of one batch."""
        linear = objective.linearize(heads=False)
        gradient, _ = objective.gradient(linear)
        loss, state = linear.outputs[0], linear.aux.state
        finite = ops.isfinite(loss) & vectors.is_finite(gradient)
        return StepResult(gradient, finite, state, {}, loss, gradient)

    def apply(self, grads, trainable_variables=None):
        """Apply a step, or change nothing where a gradient is not finite."""
        if self._stepping:  # the training loop looks after that
            super().apply(grads, trainable_variables)
            return
        grads = list(grads)
        if not self.built and trainable_variables is not None:
            self.build(trainable_variables)
        finite = vectors.is_finite([g for g in grads if g is not None])
        state = [*self._built_for.parameters, *self.variables]
        # Copies: PyTorch assigns in place.
        before = [ops.copy(value) for value in vectors.values(state)]
        with self.stepping():
            super().apply(grads, trainable_variables)
        after = vectors.values(state)
        for variable, old, new in zip(state, before, after, strict=True):
            variable.assign(ops.where(finite, new, old))
