"""Initializers from the second-order literature."""

import random

import keras
import numpy as np
from keras import ops


@keras.saving.register_keras_serializable(package="keras_secondorder")
class Sparse(keras.initializers.Initializer):
    """Martens' sparse initialization: a few strong incoming weights per unit.

    The last axis of the shape counts the output units, all axes before it together
    the incoming weights of one unit. Each unit gets its own random choice of inputs:

    ```
    fan_in = prod(shape[:-1])
    chosen = min(nonzeros, fan_in) of the fan_in inputs, without replacement
    kernel[chosen, unit] = normal(mean=0, stddev=stddev)
    kernel[others, unit] = 0
    ```

    The total input of a unit then does not grow with the width of the layer below it,
    and units start out different from each other. Values are drawn with NumPy, so one
    seed gives the same weights on every backend.

    Args:
        nonzeros: Number of non-zero incoming weights of each output unit, at least 1.
            A unit with fewer inputs than this is dense.
        stddev: Standard deviation of the non-zero weights.
        seed: A non-negative integer, or `None` for a seed that is drawn when the
            initializer is made (`keras.utils.set_random_seed` makes it reproducible).
            As with Keras's own initializers, one instance returns the same values at
            each call with the same shape.

    Raises:
        ValueError: If an argument is out of its range, or the shape has fewer than
            two axes.

    Example:
        >>> import numpy as np
        >>> kernel = Sparse(nonzeros=2, seed=0)((5, 3))
        >>> np.count_nonzero(kernel, axis=0)
        array([2, 2, 2])

    References:
        Martens, J. (2010). Deep learning via Hessian-free optimization. ICML.
        Section 5.

        Sutskever, I., Martens, J., Dahl, G., Hinton, G. (2013). On the importance of
        initialization and momentum in deep learning. ICML. Section 3.1: 15 weights
        from a unit Gaussian, biases at zero.
    """

    def __init__(
        self, nonzeros: int = 15, stddev: float = 1.0, seed: int | None = None
    ):
        if nonzeros < 1 or nonzeros != int(nonzeros):
            raise ValueError(
                "`nonzeros` must be an integer of at least 1. "
                f"Received: nonzeros={nonzeros}. Each unit needs an incoming weight."
            )
        if stddev < 0:
            raise ValueError(
                "`stddev` must not be negative. "
                f"Received: stddev={stddev}. Martens uses 1."
            )
        if seed is not None and (not isinstance(seed, int) or seed < 0):
            raise ValueError(
                "`seed` must be a non-negative integer or None. "
                f"Received: seed={seed!r}. Values are drawn with NumPy, so that all "
                "backends agree; a keras.random.SeedGenerator can't be used here."
            )
        self.nonzeros = int(nonzeros)
        self.stddev = stddev
        self.seed = seed
        self._drawn_seed = random.randrange(2**32) if seed is None else seed

    def __call__(self, shape, dtype=None):
        """Draws a kernel.

        Args:
            shape: Shape of the kernel, (..., units), with two axes or more.
            dtype: Type of the result; Keras's default float type if `None`.

        Returns:
            A tensor of that shape and type.
        """
        if len(shape) < 2:
            raise ValueError(
                "Sparse initializes kernels, of shape (..., inputs, units). "
                f"Received: shape={tuple(shape)}. Use 'zeros' for a bias."
            )
        generator = np.random.default_rng(self._drawn_seed)
        units = shape[-1]
        fan_in = int(np.prod(shape[:-1]))
        count = min(self.nonzeros, fan_in)
        order = np.argsort(generator.random((fan_in, units)), axis=0, kind="stable")
        kernel = np.zeros((fan_in, units))
        values = generator.normal(scale=self.stddev, size=(count, units))
        np.put_along_axis(kernel, order[:count], values, axis=0)
        return ops.convert_to_tensor(
            kernel.reshape(shape), dtype=dtype or keras.config.floatx()
        )

    def get_config(self):
        """Returns the arguments of the constructor.

        Returns:
            A dictionary with `nonzeros`, `stddev` and `seed`.
        """
        return {"nonzeros": self.nonzeros, "stddev": self.stddev, "seed": self.seed}
