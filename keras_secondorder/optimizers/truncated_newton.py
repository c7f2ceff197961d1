"""What the optimizers that solve for a step share: line search, damping, the logs."""

from collections.abc import Callable
from typing import NamedTuple

from keras import ops

from keras_secondorder import chunks, vectors
from keras_secondorder.arguments import check_damping, check_range
from keras_secondorder.optimizers.base import StepResult
from keras_secondorder.optimizers.flat import FlatOptimizer
from keras_secondorder.optimizers.step_report import Measured
from keras_secondorder.solvers import backtracking_line_search
from keras_secondorder.solvers.damping import AdaptiveDamping, reduction_ratio


class Trial(NamedTuple):
    """A step as a solver proposes it.

    Attributes:
        step: Flat, shape `(P,)`.
        slope: `g^T step`.
        curvature: `step^T B step` of the damped model.
        damped: The part of it that is damping.
        change: `x -> h(theta + x) - h(theta)` for a flat `x`, on the examples that
            judge a step.
        logs: Scalars for `fit`'s logs.
        carried: Pairs of a variable and its value for the next step.
    """

    step: object
    slope: object
    curvature: object
    damped: object
    change: Callable
    logs: dict
    carried: tuple = ()


class TruncatedNewton(FlatOptimizer):
    """Base class of optimizers that minimise a damped quadratic model by products.

    ```
    delta = propose(...)                                  # the subclass
    t     = backtracking line search of  h(theta + t delta)
    rho   = (h(theta + t delta) - h(theta)) / (t g^T delta + 1/2 t^2 delta^T B delta)
    theta += learning_rate t delta,   lambda from rho
    ```

    Args:
        learning_rate: A number or a Keras schedule.
        damping: `lambda`: an `AdaptiveDamping`, a number, a schedule or "auto".
        selection_fraction: Share of the batch that judges a step.
        **kwargs: Keras's shared arguments.
    """

    #: Most examples in memory at once, or None for the batch.
    chunk_size: int | None = None

    def __init__(self, learning_rate, damping, selection_fraction, **kwargs):
        check_range("selection_fraction", selection_fraction, 0, 1)
        check_damping(damping, kwargs)
        super().__init__(learning_rate, **kwargs)
        self.damping = damping
        self.selection_fraction = selection_fraction

    def build_state(self, model):
        """Create the scalars."""
        super().build_state(model)
        self.build_damping(
            AdaptiveDamping(None, every=1, decay=2 / 3, minimum=1e-6, gamma_every=None)
        )
        self.rho = self.add_scalar("rho", float("nan"))
        self.previous = self.add_variable(
            (self.size,), "zeros", self.precision, name="previous_direction"
        )

    def needs_taps(self, objective) -> bool:
        """Whether the gradient's pass records gradients at pre-activations."""
        return False

    def propose(self, objective, linear, gradient, damping, k) -> Trial:
        """Solve for a step.

        Args:
            objective: The batch.
            linear: Its linearisation; None where the batch is taken in chunks.
            gradient: Flat, shape `(P,)`.
            damping: `lambda`, a scalar.
            k: Number of steps taken.
        """
        raise NotImplementedError

    def change_of(self, objective) -> Callable:
        """`x -> h(theta + x) - h(theta)` on the examples that judge a step."""
        part = objective.part(self.selection_fraction, shift=1)

        def value(parameters):
            if self.chunk_size:
                return chunks.value(part, self.chunk_size, parameters)
            return part.value(parameters)

        loss = value(part.parameters)
        return lambda x: value(part.moved(self.unflatten(x))) - loss

    def step(self, objective):
        """One step on one batch."""
        k = ops.cast(self.iterations, "int32")
        if self.chunk_size:
            linear = None
            loss, gradient, state = chunks.loss_and_gradient(objective, self.chunk_size)
            gradient = self.flatten(gradient)
            finite = ops.isfinite(loss) & ops.all(ops.isfinite(gradient))
        else:
            linear = objective.linearize(taps=self.needs_taps(objective))
            loss, gradient, finite = self.loss_and_gradient(objective, linear)
            state = linear.aux.state
        damping = self.damping_at(k, loss, [gradient], objective.examples)
        trial = self.propose(objective, linear, gradient, damping, k)
        search = backtracking_line_search(
            lambda t: trial.change(t * trial.step),
            ops.zeros_like(trial.slope),
            trial.slope,
        )
        t = search.t
        predicted = t * trial.slope + 0.5 * t**2 * trial.curvature
        # Where no length helped, the model was wrong: more damping.
        rho = ops.where(t > 0, reduction_ratio(search.value, predicted), 0.0)
        rho = ops.cast(rho, self.precision)
        direction = -t * trial.step
        finite = finite & ops.all(ops.isfinite(direction))
        if self._adapted:
            due = ops.equal((k + 1) % self._damping_rule.every, 0)
            damping_next = ops.where(due, self.next_damping(damping, rho), damping)
            vectors.assign(
                [self.rho, self.damping_value], [rho, damping_next], where=finite
            )
        for variable, value in trial.carried:
            vectors.assign([variable], [value], where=finite)
        logs = {"damping": damping, "rho": rho, "step_length": t, **trial.logs}
        successive = vectors.cosine([direction], vectors.values([self.previous]))
        vectors.assign([self.previous], [direction], where=finite)
        quadratic = t**2 * (trial.curvature - trial.damped)
        return StepResult(
            self.unflatten(direction),
            finite,
            state,
            logs,
            loss,
            self.unflatten(gradient),
            successive,
            Measured(predicted, search.value, quadratic),
        )
