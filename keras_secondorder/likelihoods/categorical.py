"""Categorical cross-entropy, sparse or one-hot, on logits or on probabilities."""

import keras
from keras import ops

from keras_secondorder.likelihoods.base import Likelihood, inside, positive


class Categorical(Likelihood):
    """`y ~ Categorical(p)` at every position.

    ```
    on logits:         score = p - y,          F = diag(p) - p p^T
    on probabilities:  score = (p - y) / z,    F = diag(1/z) (diag(p) - p p^T) diag(1/z)
    ```

    with `p = softmax(z)` or, as Keras scales probabilities, `p = z / sum(z)`. The
    second is the first seen through the logits `log z`. Where Keras clips a
    probability, the loss is flat and its row of `F` is zero.

    Args:
        from_logits: Whether the outputs are logits.

    References:
        Schraudolph (2002), section 3; Martens (2016), thesis, section 4.3.
    """

    def __init__(self, from_logits: bool):
        self.from_logits = from_logits

    def _probability(self, z):
        if self.from_logits:
            return ops.softmax(z, axis=-1)
        return z / ops.sum(z, axis=-1, keepdims=True)

    def _slope(self, z):
        """The derivative of the logits, `1` or `1 / z`."""
        if self.from_logits:
            return ops.ones_like(z)
        seen = inside(self._probability(z))
        return ops.cast(seen, z.dtype) / ops.where(seen, z, ops.ones_like(z))

    def sample(self, z, seed):
        """One-hot targets."""
        logits = (
            ops.log_softmax(z, axis=-1)
            if self.from_logits
            else (ops.log(positive(self._probability(z))))
        )
        flat = ops.reshape(logits, (-1, z.shape[-1]))
        classes = keras.random.categorical(flat, 1, seed=seed)[:, 0]
        one_hot = ops.one_hot(classes, z.shape[-1], dtype=z.dtype)
        return ops.reshape(one_hot, ops.shape(z))

    def score(self, z, y):
        """`p - y`, over `z` where the outputs are probabilities."""
        return self._slope(z) * (self._probability(z) - y)

    def hessian_product(self, z, v):
        """`F v`."""
        p, slope = self._probability(z), self._slope(z)
        v = slope * v
        return slope * (p * v - p * ops.sum(p * v, axis=-1, keepdims=True))

    def sqrt_product(self, z, u):
        """`S u` with `S = diag(slope) (diag(r) - p r^T)`, `r = sqrt(p)`."""
        p = self._probability(z)
        r = ops.sqrt(positive(p))
        return self._slope(z) * (r * u - p * ops.sum(r * u, axis=-1, keepdims=True))
