"""Keras's Poisson loss, whose outputs are rates."""

import keras
from keras import ops

from keras_secondorder.likelihoods.base import Likelihood, positive


class Poisson(Likelihood):
    """Independent `y ~ Poisson(z)` for each of the D outputs.

    ```
    score = 1 - y / (z + eps),   F = z / (z + eps)^2  where z > 0, else 0
    ```

    The loss is not convex in `z` for every target, so its Hessian `y / z^2` is
    replaced by the expectation over targets, `1 / z` but for Keras's `eps`; behind an
    exponential activation the two are the same matrix.
    """

    def scale(self, z):
        """`1 / D`: Keras averages over the last axis."""
        return 1.0 / z.shape[-1]

    def sample(self, z, seed):
        """Targets with the mean and variance of a Poisson variable.

        Drawn from a normal distribution: only the first two moments enter the Fisher
        matrix, and not every backend can draw Poisson variables in a compiled step.
        """
        noise = keras.random.normal(ops.shape(z), dtype=z.dtype, seed=seed)
        return z + ops.sqrt(positive(z)) * noise

    def _information(self, z):
        """The diagonal of `F`."""
        positive_z = ops.maximum(z, 0.0)
        return positive_z / (positive_z + keras.config.epsilon()) ** 2

    def score(self, z, y):
        """`1 - y / (z + eps)`."""
        return 1.0 - y / (ops.maximum(z, 0.0) + keras.config.epsilon())

    def hessian_product(self, z, v):
        """`F v`."""
        return self._information(z) * v

    def sqrt_product(self, z, u):
        """`sqrt(F) u`."""
        return ops.sqrt(self._information(z)) * u
