"""Categorical cross-entropy, sparse or one-hot, on logits or on probabilities."""

import keras
from keras import ops

from keras_secondorder.likelihoods.base import Likelihood, positive


class Categorical(Likelihood):
    """`y ~ Categorical(p)` at every position.

    ```
    on logits:         score = p - y,    F = diag(p) - p p^T
    on probabilities:  score = -y / p,   F = diag(1 / p)
    ```

    Both are the same metric. The second need not subtract anything: tangents that
    come out of a softmax sum to zero.

    Args:
        from_logits: Whether the outputs are logits.

    References:
        Schraudolph (2002), section 3; Martens (2016), thesis, section 4.3.
    """

    def __init__(self, from_logits: bool):
        self.from_logits = from_logits

    def _probability(self, z):
        return ops.softmax(z, axis=-1) if self.from_logits else z

    def sample(self, z, seed):
        """One-hot targets."""
        logits = (
            ops.log_softmax(z, axis=-1) if self.from_logits else (ops.log(positive(z)))
        )
        flat = ops.reshape(logits, (-1, z.shape[-1]))
        classes = keras.random.categorical(flat, 1, seed=seed)[:, 0]
        one_hot = ops.one_hot(classes, z.shape[-1], dtype=z.dtype)
        return ops.reshape(one_hot, ops.shape(z))

    def score(self, z, y):
        """`p - y` on logits, `-y / p` on probabilities."""
        p = self._probability(z)
        return p - y if self.from_logits else -y / positive(p)

    def hessian_product(self, z, v):
        """`p v - p (p . v)` on logits, `v / p` on probabilities."""
        p = self._probability(z)
        if not self.from_logits:
            return v / positive(p)
        return p * v - p * ops.sum(p * v, axis=-1, keepdims=True)

    def sqrt_product(self, z, u):
        """`S = diag(r) - p r^T` with `r = sqrt(p)` on logits, `diag(1 / r)` else."""
        p = self._probability(z)
        r = ops.sqrt(positive(p))
        if not self.from_logits:
            return u / r
        return r * u - p * ops.sum(r * u, axis=-1, keepdims=True)
