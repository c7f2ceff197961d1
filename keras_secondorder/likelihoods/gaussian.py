"""Mean squared error."""

import keras
from keras import ops

from keras_secondorder.likelihoods.base import Likelihood


class Gaussian(Likelihood):
    """`y ~ N(z, 1)`: mean squared error is `2 / D` times its negative logarithm.

    ```
    F = I,   score = z - y
    ```

    References:
        Martens (2016), thesis, section 5.5.
    """

    def scale(self, z):
        """`2 / D`: Keras averages the squares over the last axis."""
        return 2.0 / z.shape[-1]

    def sample(self, z, seed):
        """Targets of unit variance around the outputs."""
        return z + keras.random.normal(ops.shape(z), dtype=z.dtype, seed=seed)

    def score(self, z, y):
        """`z - y`."""
        return z - y

    def hessian_product(self, z, v):
        """`v` itself."""
        return v

    def sqrt_product(self, z, u):
        """`u` itself."""
        return u
