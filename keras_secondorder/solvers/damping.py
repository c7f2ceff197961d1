"""Damping that adapts itself, after Levenberg and Marquardt."""

import math
import numbers

import keras
from keras import ops

from keras_secondorder import vectors

RHO_BOUND = 10.0


def reduction_ratio(actual, predicted):
    """`rho = (h(theta + delta) - h(theta)) / M(delta)`, the quality of the model.

    Args:
        actual: The change of the objective, a scalar.
        predicted: The change that the quadratic model predicts, negative.

    Returns:
        `rho`, a scalar between -10 and 10. Where the model predicts no decrease, as it
        may under momentum, the actual change decides between the two.

    References:
        Martens (2016), thesis, sections 4.6.2 and 6.6.5.
    """
    rho = actual / ops.minimum(predicted, -1e-30)
    return ops.clip(rho, -RHO_BOUND, RHO_BOUND)


def loss_unit(loss, gradient):
    """A unit for `lambda`, from the first batch.

    ```
    min(|h|, 1000 |gradient|^2 / |h|)
    ```

    It grows with the loss as the curvature does, so that a multiple of the loss has
    the same steps. A loss that is large because its targets are is not followed: with
    `lambda = 0.01` units, what is damping alone in the first step lowers the loss by a
    tenth at least.

    Args:
        loss: The objective on the batch.
        gradient: Its gradient, a list of tensors.

    Returns:
        A scalar.
    """
    h = ops.absolute(loss)
    steep = 1000.0 * ops.divide_no_nan(vectors.norm(gradient), h)
    return ops.minimum(h, steep * vectors.norm(gradient))


@keras.saving.register_keras_serializable(package="keras_secondorder")
class AdaptiveDamping:
    """Damping that follows how well the quadratic model predicts the loss.

    It is the rule of Levenberg and Marquardt, as Martens has it.

    Every `every` steps, with `omega = decay ** every`:

    ```
    rho > 3/4:              lambda <- omega lambda
    rho < 1/4, or not finite: lambda <- lambda / omega
    ```

    Args:
        initial: `lambda` at the start; None for `share` of the first batch's
            `loss_unit`, which suits losses of any scale. "auto" is 150, as in the
            thesis, and 0.2 with `relative`.
        every: Steps between two adaptations, T1.
        decay: The factor for one step; the thesis has 19/20.
        minimum: Least `lambda`; in units of the loss where `initial` is None, and None
            there for `1 / N` with N examples in the first batch: gradients are that
            noisy. Whatever it is, a factor is never damped by less than its rounding
            error.
        maximum: Largest `lambda`, in the same units.
        gamma_every: Steps between two trials of the factored damping `gamma`, T2, or
            None to keep `gamma = sqrt(lambda + eta)`. Each trial compares the values
            `gamma`, `omega gamma` and `gamma / omega` with
            `omega = sqrt(decay) ** gamma_every` by the quadratic model, so it needs a
            step rule that has one.
        share: `lambda` at the start, in units of the loss, where `initial` is None.
        relative: Whether `lambda` is in units of each block's mean eigenvalue, so that
            what is flat is damped by little, and what is steep by much: 0.2 as
            `initial` is a fifth of it. For K-FAC.

    References:
        Martens (2016), thesis, sections 6.6.5 and 6.6.6.
    """

    def __init__(
        self,
        initial: float | str | None = "auto",
        every: int = 5,
        decay: float = 19 / 20,
        minimum: float | None = 0.0,
        maximum: float = 1e8,
        gamma_every: int | None = 20,
        share: float = 0.1,
        relative: bool = False,
    ):
        if initial == "auto":
            initial = 0.2 if relative else 150.0
        number = isinstance(initial, numbers.Real) and 0 <= initial < math.inf
        if initial is not None and not number:
            raise ValueError(
                "`initial` must be a number of at least 0, None or 'auto'. "
                f"Received initial={initial!r}."
            )
        if not 0 < decay < 1:
            raise ValueError(
                f"`decay` must lie between 0 and 1. Received decay={decay}. "
                "The thesis has 19/20."
            )
        if every < 1 or (gamma_every is not None and gamma_every < 1):
            raise ValueError(
                "`every` and `gamma_every` count steps and must be at least 1. "
                f"Received every={every}, gamma_every={gamma_every}. "
                "The thesis has 5 and 20."
            )
        if not (minimum or 0.0) <= maximum or (minimum or 0.0) < 0:
            raise ValueError(
                "`minimum` must be at least 0 and at most `maximum`. "
                f"Received minimum={minimum}, maximum={maximum}."
            )
        if initial is not None and not (minimum or 0.0) <= initial <= maximum:
            raise ValueError(
                "`initial` must lie between `minimum` and `maximum`. Received "
                f"initial={initial}, minimum={minimum}, maximum={maximum}."
            )
        if not 0 < share < math.inf:
            raise ValueError(
                f"`share` must be a number above 0. Received share={share}."
            )
        if minimum is None and initial is not None:
            raise ValueError(
                "`minimum=None` is in units of the loss, as `initial=None` is. "
                f"Received minimum=None with initial={initial}. Give a number."
            )
        if not isinstance(relative, bool):
            raise ValueError(
                f"`relative` must be True or False. Received relative={relative!r}."
            )
        if relative and initial is None:
            raise ValueError(
                "`relative=True` is in units of each block, `initial=None` in units of "
                "the loss. Give a number as `initial`, such as 0.2."
            )
        self.initial = initial
        self.every = every
        self.decay = decay
        self.minimum = minimum
        self.maximum = maximum
        self.gamma_every = gamma_every
        self.share = share
        self.relative = relative

    def start(self, damping, bounds, loss, gradient, examples) -> tuple:
        """`lambda` and its bounds as they are, or what they start from.

        Args:
            damping: The variable's value.
            bounds: The least and the largest `lambda`, shape `(2,)`; zeros while no
                batch had a gradient, and with `initial`.
            loss: The objective on the batch.
            gradient: Its gradient, a list of tensors.
            examples: Number of examples in the batch.

        Returns:
            A scalar and a tensor of shape `(2,)`.
        """
        if self.initial is not None:
            return damping, bounds
        unit = loss_unit(loss, gradient)
        usable = ops.logical_and(ops.isfinite(unit), unit > 0)
        # Without a gradient any damping will do, but 0.
        unit = ops.where(usable, unit, 1.0)
        least = self.minimum
        if least is None:
            least = 1.0 / ops.cast(examples, unit.dtype)
        first = ops.stack([unit * least, unit * self.maximum])
        known = bounds[1] > 0
        # The number of examples is NaN where one of their weights is.
        started = ops.clip(self.share * unit, first[0], first[1])
        started = ops.where(usable, started, self.share)
        damping = ops.where(known, damping, started)
        return damping, ops.where(ops.logical_or(known, ~usable), bounds, first)

    def update(self, damping, rho, bounds=None):
        """The next `lambda`.

        Args:
            damping: `lambda`, a scalar.
            rho: The reduction ratio; NaN where the loss overflowed.
            bounds: What `start` returned.
        """
        omega = self.decay**self.every
        poor = ops.logical_or(rho < 0.25, ops.logical_not(ops.isfinite(rho)))
        factor = ops.where(rho > 0.75, omega, ops.where(poor, 1 / omega, 1.0))
        least, most = self.minimum, self.maximum
        if self.initial is None:
            least, most = bounds[0], bounds[1]
        return ops.clip(damping * factor, least, most)

    def gamma_candidates(self, gamma) -> list:
        """The factored dampings that one trial compares with the present one."""
        omega = self.decay ** (self.gamma_every / 2)
        return [omega * gamma, gamma / omega]

    def get_config(self) -> dict:
        """The constructor's arguments."""
        return {
            "initial": self.initial,
            "every": self.every,
            "decay": self.decay,
            "minimum": self.minimum,
            "maximum": self.maximum,
            "gamma_every": self.gamma_every,
            "share": self.share,
            "relative": self.relative,
        }

    @classmethod
    def from_config(cls, config: dict):
        """Rebuild the rule from its arguments."""
        return cls(**config)
