"""Natural neural networks, without a change of the network."""

import keras

from keras_secondorder import vectors
from keras_secondorder.optimizers.acp import ACP


@keras.saving.register_keras_serializable(package="keras_secondorder")
class NaturalNetwork(ACP):
    """Gradient descent as a natural neural network takes it (PRONG), on a plain model.

    ```
    s = U (h - mean) V + d,   U = (C + damping I)^(-1/2)     # the other network
    K = U V,   b = d - mean K                                # this one
    dK = (C + damping I)^-1 E[(h - mean)^T g]                # every step
    db = E[g] / (1 + damping) - mean dK
    ```

    A step on `V` and `d` is a step on `K` and `b` preconditioned by `C`, so that no
    layer need be replaced: it is `ACP` with `alpha = 1` and a `mean` that is kept, too.
    To whiten the layers themselves, see `keras_secondorder.layers.whiten`.

    Args:
        learning_rate: A number or a Keras schedule.
        momentum: A number in [0, 1).
        damping: What is added to the covariances.
        refresh_every: Steps between two estimates of `mean`, `C` and the inverse.
        statistics_decay: Largest weight of the past in `mean` and `C`.
        max_factor_size: `C` is diagonal for layers with more inputs.
        **kwargs: Keras's shared arguments (`weight_decay`, `use_ema`, ...).

    Raises:
        ValueError: A number outside its range.

    References:
        Desjardins, Simonyan, Pascanu & Kavukcuoglu (2015), algorithm 1; George (2017),
        thesis, section 6.5.2. Momentum is kept in the coordinates of `K` and `b`, and
        `d` is damped like `V`, which the sources do not do.
    """

    def __init__(
        self,
        learning_rate=0.1,
        momentum: float = 0.9,
        damping: float = 0.1,
        refresh_every: int = 100,
        statistics_decay: float = 0.95,
        max_factor_size: int = 8192,
        **kwargs,
    ):
        super().__init__(
            learning_rate,
            momentum,
            damping,
            1.0,
            refresh_every,
            statistics_decay,
            max_factor_size,
            **kwargs,
        )

    def mean_of(self, covariance, seen):
        """The mean input of the last estimate, as the other network keeps it."""
        return vectors.values([covariance.mean])[0]
