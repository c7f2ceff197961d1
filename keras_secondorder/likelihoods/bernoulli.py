"""Binary cross-entropy, on logits or on probabilities."""

import keras
from keras import ops

from keras_secondorder.likelihoods.base import Likelihood, inside


class Bernoulli(Likelihood):
    """Independent `y ~ Bernoulli(p)` for each of the D outputs.

    ```
    on logits:         score = p - y,               F = p (1 - p)
    on probabilities:  score = (p - y) / (p (1 - p)),   F = 1 / (p (1 - p))
    ```

    Both are the same metric: the Jacobian of the sigmoid is `p (1 - p)`. Where Keras
    clips a probability, as of an output below 0, the loss is flat and `F` is zero.

    Args:
        from_logits: Whether the outputs are logits.
    """

    def __init__(self, from_logits: bool):
        self.from_logits = from_logits

    def scale(self, z):
        """`1 / D`: Keras averages over the last axis."""
        return 1.0 / z.shape[-1]

    def _probability(self, z):
        return ops.sigmoid(z) if self.from_logits else z

    def _information(self, z):
        """The diagonal of `F`."""
        if self.from_logits:
            # sigmoid(z) sigmoid(-z) keeps its digits where 1 - p has none left.
            return ops.sigmoid(z) * ops.sigmoid(-z)
        seen = inside(z)
        variance = ops.where(seen, z * (1.0 - z), ops.ones_like(z))
        return ops.cast(seen, z.dtype) / variance

    def sample(self, z, seed):
        """Targets 0 and 1."""
        u = keras.random.uniform(ops.shape(z), dtype=z.dtype, seed=seed)
        return ops.cast(u < self._probability(z), z.dtype)

    def score(self, z, y):
        """`p - y`, over the variance where the outputs are probabilities."""
        difference = self._probability(z) - y
        return difference if self.from_logits else difference * self._information(z)

    def hessian_product(self, z, v):
        """`F v`."""
        return self._information(z) * v

    def sqrt_product(self, z, u):
        """`sqrt(F) u`."""
        return ops.sqrt(self._information(z)) * u
