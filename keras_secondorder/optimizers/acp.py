"""The amortized covariance preconditioner."""

import keras
from keras import ops

from keras_secondorder import vectors
from keras_secondorder.arguments import check_range
from keras_secondorder.curvature import InputCovariance, input_mean
from keras_secondorder.curvature.factor import damped_inverses
from keras_secondorder.optimizers.base import is_due
from keras_secondorder.optimizers.centered_sgd import CenteredSGD, Seen


@keras.saving.register_keras_serializable(package="keras_secondorder")
class ACP(CenteredSGD):
    """Gradient descent preconditioned by the covariance of each layer's input.

    For an affine layer `s = a K + b` with pre-activation gradient `g`, and `mean` and
    `C` those of its input:

    ```
    alpha = max over units of E[g_i^2], or a number            # every refresh_every
    P  = (C + damping / alpha I)^-1                            # every refresh_every
    dK = 1 / alpha P E[(a - mean)^T g]                         # mean of the batch
    db = 1 / (alpha + damping) E[g] - mean dK
    d  = momentum * d_previous + [dK; db]
    W -= learning_rate * d
    ```

    This is K-FAC with `alpha I` in place of the gradient factor: one inverse for each
    layer instead of two, seldom computed, and no sampled targets. Layers without a
    bias take the second moment in place of the covariance; variables of layers that
    are not affine take plain gradient steps.

    Args:
        learning_rate: A number or a Keras schedule.
        momentum: A number in [0, 1).
        damping: Tikhonov damping, in units of the loss. What is added to `C` is this
            over `alpha`.
        alpha: A number for all layers, or None for the largest mean square gradient
            of each layer.
        refresh_every: Steps between two updates of `C`, `alpha` and `P`; all of the
            first three steps update them.
        statistics_decay: Largest weight of the past in `C` and `alpha`.
        max_factor_size: `C` is diagonal for layers with more inputs.
        **kwargs: Keras's shared arguments (`weight_decay`, `use_ema`, ...).

    Raises:
        ValueError: A number outside its range.

    Example:
        >>> import keras, keras_secondorder as kso
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile(optimizer=kso.ACP(0.1, alpha=2.0), loss="mse")
        >>> x = 3.0 + keras.random.normal((64, 4), seed=0)
        >>> history = model.fit(x, x[:, :1], epochs=50, verbose=0)
        >>> history.history["loss"][-1] < 0.01
        True

    References:
        George (2017), thesis, section 6.4.2 and algorithm 3; 6.3.4 for the bias. The
        averages over batches are ours, and that the bias is damped like the weights.
    """

    def __init__(
        self,
        learning_rate=0.03,
        momentum: float = 0.9,
        damping: float = 0.1,
        alpha: float | None = None,
        refresh_every: int = 20,
        statistics_decay: float = 0.95,
        max_factor_size: int = 8192,
        **kwargs,
    ):
        for name, value, most in (
            ("damping", damping, None),
            ("alpha", alpha, None),
            ("refresh_every", refresh_every, None),
            ("statistics_decay", statistics_decay, 1),
            ("max_factor_size", max_factor_size, None),
        ):
            if value is not None:
                check_range(name, value, 0, most)
        super().__init__(learning_rate, momentum, **kwargs)
        self.damping = damping
        self.alpha = alpha
        self.refresh_every = refresh_every
        self.statistics_decay = statistics_decay
        self.max_factor_size = max_factor_size

    def build_state(self, model):
        """Create the means, the covariances and their inverses."""
        super().build_state(model)
        self.covariances = {
            (i, k): InputCovariance(
                part, self.add_variable, f"{b.layer_name}_{k}", self.max_factor_size
            )
            for i, b in enumerate(self.layers)
            for k, part in enumerate(b.wrapper.parts)
            if not part.one_hot
        }
        self.count = self.add_scalar("statistics_count", 0.0)

    @property
    def _needs_taps(self):
        return self.alpha is None

    def observe(self, seen, finite):
        """Refresh the inverses where it is time."""
        k = ops.cast(self.iterations, "int32")
        due = ops.logical_and(finite, is_due(k, self.refresh_every))
        used = {p: C for p, C in self.covariances.items() if seen[p[0]].inputs}
        if not used:
            return
        (before,) = vectors.values([self.count])
        old = [vectors.values(C.variables) for C in used.values()]

        def refreshed():
            count = before + 1.0
            new = [
                C.averaged(*seen[i], count, self.statistics_decay, self.alpha)
                for (i, _), C in used.items()
            ]
            systems = [
                C.system(*values, self.damping)
                for C, values in zip(used.values(), new, strict=True)
            ]
            # All at once: see `spd_inverses`.
            inverses = damped_inverses(
                *zip(*systems, strict=True), self.compiled_by_xla
            )
            kept = []
            for values, inverse, last in zip(new, inverses, old, strict=True):
                values = [*values, inverse]
                usable = vectors.is_finite(values)
                kept.append(
                    [ops.where(usable, n, o) for n, o in zip(values, last, strict=True)]
                )
            return kept, count

        new, count = ops.cond(due, refreshed, lambda: (old, before))
        for C, values in zip(used.values(), new, strict=True):
            vectors.assign(C.variables, values)
        vectors.assign([self.count], [count])

    def transformed(self, i, k, W, seen):
        """`U` of one affine map."""
        C = self.covariances[i, k]
        return C.precondition(W, self.damping, self.mean_of(C, seen))

    def mean_of(self, covariance: InputCovariance, seen: Seen):
        """The mean input that the bias sits at: that of the batch.

        Means move fast early on, and one that is a few steps old makes the weights
        learn what the bias should.

        Args:
            covariance: What is kept of an affine map.
            seen: What its layer saw of the batch.
        """
        return input_mean(covariance.part, seen.inputs, seen.weights)
