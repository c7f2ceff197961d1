"""Keras's Poisson loss, whose outputs are rates."""

import keras
from keras import ops

from keras_secondorder.likelihoods.base import Likelihood, positive


class Poisson(Likelihood):
    """Independent `y ~ Poisson(z)` for each of the D outputs.

    ```
    score = 1 - y / z,   F = 1 / z
    ```

    The loss is not convex in `z` for every target, so its Hessian `y / z^2` is
    replaced by the expectation over targets, `1 / z`; behind an exponential
    activation the two are the same matrix.
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

    def score(self, z, y):
        """`1 - y / z`."""
        return (z - y) / positive(z)

    def hessian_product(self, z, v):
        """`v / z`."""
        return v / positive(z)

    def sqrt_product(self, z, u):
        """`u / sqrt(z)`."""
        return u / ops.sqrt(positive(z))
