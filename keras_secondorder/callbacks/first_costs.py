"""What the first look of each kind may take, before it was taken once."""

import math

import keras

from keras_secondorder.diagnostics import has_blocks

SECONDS_PER_CUBE = 8e-11  # of the eigenvalues of a factor, per cube of its side
PICTURE_SECONDS = 0.3
# To compile what looks at factors of one shape, and the share of the time of the first
# step that it takes at least; both on two cores.
SECONDS_PER_SHAPE = {"jax": 0.15, "tensorflow": 0.02, "torch": 0.0}
SHARE_OF_COMPILATION = {"jax": 0.1, "tensorflow": 0.0, "torch": 0.0}
# Of a first measurement of the network at least, on one core.
NETWORK_SECONDS = {"jax": 5.0, "tensorflow": 3.0, "torch": 0.5}
# Products with a matrix of the network that each measurement takes, roughly.
PRODUCTS = {"hessian": 80, "gauss_newton": 80, "density": 50, "noise": 10, "errors": 20}


class FirstCosts:
    """Guesses of the seconds that first looks take, rather too high than too low.

    Args:
        optimizer: The optimizer whose factors are looked at, if it has any.
    """

    def __init__(self, optimizer):
        backend = keras.config.backend()
        blocks = optimizer.blocks if has_blocks(optimizer) else ()
        shapes = [f.shape for b in blocks for f in b.factors]
        cubes = sum(math.prod(shape) * shape[-1] for shape in shapes)
        self._spectra = SECONDS_PER_CUBE * cubes + 0.01
        self._shapes = SECONDS_PER_SHAPE[backend] * len({*map(tuple, shapes)})
        self._share = SHARE_OF_COMPILATION[backend]
        self._network = NETWORK_SECONDS[backend]

    def of(self, name: str, compilation: float, step: float) -> float:
        """Seconds of the first look of some name.

        Args:
            name: "steps", "layers", "pictures" or a key of `PRODUCTS`.
            compilation: Seconds of the first step of training, which compiles.
            step: Seconds of a later one.
        """
        if name == "steps":
            return 0.0  # some tenths of a second; without it there is nothing to see
        if name in PRODUCTS:
            # Products that cost half a step each, and functions to compile: that takes
            # as long as the first step did, unless it was compiled before.
            compiling = max(2.0 * compilation, self._network)
            return compiling + 0.5 * PRODUCTS[name] * step
        compiling = max(self._share * compilation, self._shapes)
        return compiling + (self._spectra if name == "layers" else PICTURE_SECONDS)
