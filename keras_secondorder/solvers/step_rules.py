"""How long a step is: from a preconditioned gradient to an update."""

import math
from collections.abc import Callable
from typing import NamedTuple

import keras
import numpy as np
from keras import ops

from keras_secondorder import vectors
from keras_secondorder.solvers.bounds import RelativeRadius, RelativeStep, bound_at
from keras_secondorder.solvers.quadratic_model import minimise
from keras_secondorder.solvers.schedules import at_step, deserialize, serialize

LEAST_RMS = 0.03  # weights that start at zero have to get away from there


class Proposal(NamedTuple):
    """What a step rule sees.

    Attributes:
        direction: The preconditioned gradient `U`, a list of tensors.
        previous: The direction of the step before, zeros at first.
        gradient: The gradient of the objective.
        loss: The objective on this batch.
        reference: The loss of what knows nothing, from `reference_loss`.
        learning_rate: The optimizer's learning rate at this step.
        iterations: Steps taken so far, an integer scalar.
        weights: Values of the trainable variables.
        places: For each block of the curvature, the indices of its variables.
        model: `model(vectors) -> (Q, b)`: the damped quadratic model in the span of
            some parameter-space vectors, `Q` of shape `(k, k)` and `b` of shape `(k,)`.
            Only for rules with `needs_model`.
    """

    direction: list
    previous: list
    gradient: list
    loss: object
    reference: object
    learning_rate: object
    iterations: object
    weights: list
    places: list
    model: Callable | None


class Step(NamedTuple):
    """What a step rule decides: `d = alpha U + mu d_previous`, `theta -= lr d`.

    Attributes:
        alpha: Weight of the preconditioned gradient.
        mu: Weight of the previous direction.
        learning_rate: What multiplies `d`.
        predicted: The change of the objective that the quadratic model predicts, or
            None where the rule has not asked it.
        shares: What `alpha` is multiplied by for each variable; empty for 1.
    """

    alpha: object
    mu: object
    learning_rate: object
    predicted: object | None
    shares: list = ()

    def direction(self, U: list, previous: list) -> list:
        """`d`, a list of tensors."""
        shares = self.shares or [1.0] * len(U)
        new = [
            vectors.cast(self.alpha * share, u.dtype) * u
            for share, u in zip(shares, U, strict=True)
        ]
        return vectors.axpy(self.mu, previous, new)


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
            bound = bound_at(self.norm_constraint, proposal)
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
class TrustRegionStep(StepRule):
    """A given learning rate and momentum, inside a trust region on the quadratic form.

    ```
    s_l = min(1, relative_step max(rms(theta_l), 0.03) / (lr rms(U_l)))   # by layer
    nu  = min(1, sqrt(c / (lr^2 sum_l s_l^2 gradient_l . U_l)))
    d_l = nu s_l U_l + mu d_previous_l,   theta -= lr d
    ```

    `gradient . U` stands for `U^T F U`, so the part of the step that comes from this
    batch has `delta^T F delta` at most `c`: twice the Kullback-Leibler divergence by
    which it changes the predictions. `s_l` keeps the same part small beside the weights
    of the layer, however flat the loss is there: on a plateau the curvature says
    nothing of where it ends.

    Args:
        momentum: `mu`, a number or schedule.
        norm_constraint: `c`: a number, a schedule, a `RelativeRadius`, or None for no
            bound.
        relative_step: Bound on the root mean square of a layer's step, as a share of
            that of its weights: a number, a schedule, a `RelativeStep`, or None.

    References:
        Ba, Grosse & Martens (2017), section 5 ("KL clipping"); Shazeer & Stern (2018),
        *Adafactor*, section 8, for steps relative to the weights.
    """

    def __init__(self, momentum=0.9, norm_constraint=None, relative_step=None):
        self.momentum = momentum
        self.norm_constraint = norm_constraint
        self.relative_step = relative_step

    def step(self, proposal):
        """Shorten the new part of the step to the trust region."""
        lr = ops.cast(proposal.learning_rate, "float32")
        nu, shares = ops.ones(()), self._shares(proposal, lr)
        if self.norm_constraint is not None:
            c = bound_at(self.norm_constraint, proposal)
            slopes = _by_block(proposal.gradient, proposal.direction, proposal.places)
            square = lr**2 * ops.sum(shares**2 * slopes)
            nu = ops.minimum(1.0, ops.sqrt(c / ops.maximum(square, 1e-30)))
        # Under a rate of 0 no bound holds, and momentum would carry the step on.
        nu = ops.where(lr > 0, nu, 0.0)
        mu = ops.cast(at_step(self.momentum, proposal.iterations), "float32")
        return Step(nu, mu, lr, None, _by_variable(shares, proposal.places))

    def _shares(self, proposal: Proposal, lr):
        """`s_l`, one for each block."""
        places = proposal.places
        if self.relative_step is None:
            return ops.ones((len(places),))
        U, weights = (
            ops.sqrt(_by_block(v, v, places))
            for v in (proposal.direction, proposal.weights)
        )
        sizes = [sum(math.prod(proposal.weights[i].shape) for i in p) for p in places]
        least = LEAST_RMS * np.sqrt(sizes, dtype="float32")
        largest = bound_at(self.relative_step, proposal) * ops.maximum(weights, least)
        return ops.minimum(1.0, largest / ops.maximum(lr * U, 1e-30))

    def get_config(self):
        """The constructor's arguments."""
        return {
            "momentum": serialize(self.momentum),
            "norm_constraint": serialize(self.norm_constraint),
            "relative_step": serialize(self.relative_step),
        }


def _by_block(u: list, v: list, places: list):
    """The inner products of two vectors, block by block; a float32 tensor."""
    products = [vectors.dot([u[i] for i in p], [v[i] for i in p]) for p in places]
    return ops.stack([vectors.cast(product, "float32") for product in products])


def _by_variable(values, places: list) -> list:
    """The value of its block for each variable."""
    found = {}
    for value, own in zip(ops.unstack(values, len(places)), places, strict=True):
        found |= dict.fromkeys(own, value)
    return [found[i] for i in range(len(found))]


def rule_for(adaptive: bool, momentum, norm_constraint, relative_step) -> StepRule:
    """The rule that `KFAC`'s arguments ask for, "auto" among them.

    Args:
        adaptive: Whether the learning rate is "adaptive".
        momentum: A number, a schedule, "adaptive" or "auto".
        norm_constraint: A number, a schedule, a `RelativeRadius`, None or "auto".
        relative_step: A number, a schedule, a `RelativeStep`, None or "auto".

    Returns:
        An `AdaptiveStep` or a `TrustRegionStep`.
    """
    automatic = norm_constraint == "auto"
    if adaptive:
        momentum = None if isinstance(momentum, str) else momentum
        return AdaptiveStep(momentum, None if automatic else norm_constraint)
    return TrustRegionStep(
        0.9 if momentum == "auto" else momentum,
        RelativeRadius() if automatic else norm_constraint,
        RelativeStep() if relative_step == "auto" else relative_step,
    )
