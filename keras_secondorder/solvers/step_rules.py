"""How long a step is: from a preconditioned gradient to an update."""

from collections.abc import Callable
from typing import NamedTuple

import keras
from keras import ops

from keras_secondorder import vectors
from keras_secondorder.solvers.quadratic_model import minimise
from keras_secondorder.solvers.schedules import at_step, deserialize, serialize


class Proposal(NamedTuple):
    """What a step rule sees.

    Attributes:
        direction: The preconditioned gradient `U`, a list of tensors.
        previous: The direction of the step before, zeros at first.
        gradient: The gradient of the objective.
        loss: The objective on this batch.
        learning_rate: The optimizer's learning rate at this step.
        iterations: Steps taken so far, an integer scalar.
        model: `model(vectors) -> (Q, b)`: the damped quadratic model in the span of
            some parameter-space vectors, `Q` of shape `(k, k)` and `b` of shape `(k,)`.
            Only for rules with `needs_model`.
    """

    direction: list
    previous: list
    gradient: list
    loss: object
    learning_rate: object
    iterations: object
    model: Callable | None


class Step(NamedTuple):
    """What a step rule decides: `d = alpha U + mu d_previous`, `theta -= lr d`.

    Attributes:
        alpha: Weight of the preconditioned gradient.
        mu: Weight of the previous direction.
        learning_rate: What multiplies `d`.
        predicted: The change of the objective that the quadratic model predicts, or
            None where the rule has not asked it.
    """

    alpha: object
    mu: object
    learning_rate: object
    predicted: object | None


class StepRule:
    """Base of step rules; a subclass decides on `alpha` and `mu`."""

    #: Whether `step` evaluates the quadratic model.
    needs_model = False

    def step(self, proposal: Proposal) -> Step:
        """Decide on a step."""
        raise NotImplementedError

    def get_config(self) -> dict:
        """The constructor's arguments."""
        return {}

    @classmethod
    def from_config(cls, config: dict):
        """Rebuild the rule from its arguments."""
        return cls(**{key: deserialize(value) for key, value in config.items()})


@keras.saving.register_keras_serializable(package="keras_secondorder")
class AdaptiveStep(StepRule):
    """Learning rate and momentum from the quadratic model, jointly.

    ```
    alpha, mu = argmin M(-alpha U - mu d_previous)
    M(delta) = 1/2 delta^T (F + (lambda + eta) I) delta + gradient . delta
    ```

    Args:
        momentum: A number or schedule to fix `mu`, or None to minimise over it too.
        norm_constraint: Optional bound on `delta^T (F + (lambda + eta) I) delta`.

    References:
        Martens (2016), thesis, sections 6.6.4 (alpha) and 6.7 (momentum).
    """

    needs_model = True

    def __init__(self, momentum=None, norm_constraint=None):
        self.momentum = momentum
        self.norm_constraint = norm_constraint

    def step(self, proposal):
        """Minimise the model over the span of both directions."""
        Q, b = proposal.model(
            [vectors.scale(-1.0, v) for v in (proposal.direction, proposal.previous)]
        )
        if self.momentum is None:
            alpha, mu, value = minimise(Q, b)
        else:
            mu = ops.cast(at_step(self.momentum, proposal.iterations), "float32")
            alpha = -(b[0] + mu * Q[0, 1]) / ops.maximum(Q[0, 0], 1e-30)
        square = alpha**2 * Q[0, 0] + 2 * alpha * mu * Q[0, 1] + mu**2 * Q[1, 1]
        if self.norm_constraint is not None:
            bound = _radius(self.norm_constraint, proposal)
            shrink = ops.minimum(1.0, ops.sqrt(bound / ops.maximum(square, 1e-30)))
            alpha, mu, square = alpha * shrink, mu * shrink, square * shrink**2
        value = 0.5 * square + alpha * b[0] + mu * b[1]
        return Step(alpha, mu, ops.ones(()), value)

    def get_config(self):
        """The constructor's arguments."""
        return {
            "momentum": serialize(self.momentum),
            "norm_constraint": serialize(self.norm_constraint),
        }


@keras.saving.register_keras_serializable(package="keras_secondorder")
class RelativeRadius:
    """A trust region in units of the loss, which shrinks as training goes on.

    ```
    c_n = fraction * |loss| * min(1, steps / n)
    ```

    A step may change the predictions by a share of the loss that is left, so the same
    numbers serve losses of any scale. The decay averages the noise of the batches out,
    as the learning rate of a stochastic method has to.

    Args:
        fraction: Share of the loss of the batch.
        steps: Number of steps after which the radius falls as `1 / n`.
    """

    def __init__(self, fraction: float = 0.01, steps: int = 60):
        self.fraction = fraction
        self.steps = steps

    def __call__(self, loss, iterations):
        """`c_n`, a float32 scalar."""
        n = ops.cast(iterations, "float32") + 1.0
        decay = ops.minimum(1.0, self.steps / n)
        return self.fraction * ops.absolute(ops.cast(loss, "float32")) * decay

    def get_config(self) -> dict:
        """The constructor's arguments."""
        return {"fraction": self.fraction, "steps": self.steps}

    @classmethod
    def from_config(cls, config: dict):
        """Rebuild the object from its arguments."""
        return cls(**config)


def _radius(constraint, proposal: Proposal):
    if isinstance(constraint, RelativeRadius):
        return constraint(proposal.loss, proposal.iterations)
    return ops.cast(at_step(constraint, proposal.iterations), "float32")


@keras.saving.register_keras_serializable(package="keras_secondorder")
class TrustRegionStep(StepRule):
    """A given learning rate and momentum, inside a trust region on the quadratic form.

    ```
    nu = min(1, sqrt(c / (lr^2 gradient . U)))
    d  = nu U + mu d_previous,   theta -= lr d
    ```

    `gradient . U` stands for `U^T F U`, so the part of the step that comes from this
    batch has `delta^T F delta` at most `c`: twice the Kullback-Leibler divergence by
    which it changes the predictions.

    Args:
        momentum: `mu`, a number or schedule.
        norm_constraint: `c`: a number, a schedule, a `RelativeRadius`, or None for no
            bound.

    References:
        Ba, Grosse & Martens (2017), section 5 ("KL clipping").
    """

    def __init__(self, momentum=0.9, norm_constraint=None):
        self.momentum = momentum
        self.norm_constraint = norm_constraint

    def step(self, proposal):
        """Shorten the new part of the step to the trust region."""
        lr = ops.cast(proposal.learning_rate, "float32")
        nu = ops.ones(())
        if self.norm_constraint is not None:
            c = _radius(self.norm_constraint, proposal)
            square = lr**2 * vectors.dot(proposal.gradient, proposal.direction)
            nu = ops.minimum(1.0, ops.sqrt(c / ops.maximum(square, 1e-30)))
        mu = ops.cast(at_step(self.momentum, proposal.iterations), "float32")
        return Step(nu, mu, lr, None)

    def get_config(self):
        """The constructor's arguments."""
        return {
            "momentum": serialize(self.momentum),
            "norm_constraint": serialize(self.norm_constraint),
        }
