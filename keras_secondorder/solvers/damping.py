"""Damping that adapts itself, after Levenberg and Marquardt."""

import keras
from keras import ops

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
        initial: `lambda` at the start; None for a tenth of the first batch's loss,
            which suits losses of any scale.
        every: Steps between two adaptations, T1.
        decay: The factor for one step; the thesis has 19/20.
        minimum: Least `lambda`. Whatever it is, a factor is never damped by less than
            its rounding error.
        maximum: Largest `lambda`.
        gamma_every: Steps between two trials of the factored damping `gamma`, T2, or
            None to keep `gamma = sqrt(lambda + eta)`. Each trial compares the values
            `gamma`, `omega gamma` and `gamma / omega` with
            `omega = sqrt(decay) ** gamma_every` by the quadratic model, so it needs a
            step rule that has one.

    References:
        Martens (2016), thesis, sections 6.6.5 and 6.6.6.
    """

    def __init__(
        self,
        initial: float | None = 150.0,
        every: int = 5,
        decay: float = 19 / 20,
        minimum: float = 0.0,
        maximum: float = 1e8,
        gamma_every: int | None = 20,
    ):
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
        self.initial = initial
        self.every = every
        self.decay = decay
        self.minimum = minimum
        self.maximum = maximum
        self.gamma_every = gamma_every

    def start(self, damping, loss):
        """`lambda` as it is, or what it starts from while it is not set.

        Args:
            damping: The variable's value; 0 before the first step without `initial`.
            loss: The objective on the batch.

        Returns:
            A positive scalar.
        """
        if self.initial is not None:
            return damping
        started = ops.clip(0.1 * ops.absolute(loss), self.minimum, self.maximum)
        unset = ops.logical_and(damping <= 0, ops.isfinite(loss))
        return ops.where(unset, started, damping)

    def update(self, damping, rho):
        """The next `lambda`.

        Args:
            damping: `lambda`, a scalar.
            rho: The reduction ratio; NaN where the loss overflowed.
        """
        omega = self.decay**self.every
        poor = ops.logical_or(rho < 0.25, ops.logical_not(ops.isfinite(rho)))
        factor = ops.where(rho > 0.75, omega, ops.where(poor, 1 / omega, 1.0))
        return ops.clip(damping * factor, self.minimum, self.maximum)

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
        }

    @classmethod
    def from_config(cls, config: dict):
        """Rebuild the rule from its arguments."""
        return cls(**config)
