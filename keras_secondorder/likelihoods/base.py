"""What a Keras loss says about the distribution of the targets."""

import keras
from keras import ops


class Likelihood:
    """A loss read as `loss(y, z) = scale(z) * -log p(y | z) + constant`.

    `z` is the network's output, of shape `(..., D)`; all leading axes are positions,
    which are independent of one another. A subclass gives the five verbs below. The
    Fisher matrix `F(z)` of `p(. | z)` with respect to `z` is one `(D, D)` block for
    each position.
    """

    def scale(self, z) -> float:
        """The loss's own constant, e.g. `1 / D` where it averages over the axis."""
        return 1.0

    def sample(self, z, seed):
        """Targets drawn from `p(y | z)`, in the shape that `score` takes."""
        raise NotImplementedError

    def score(self, z, y):
        """The gradient of `-log p(y | z)` with respect to `z`, shaped like `z`."""
        raise NotImplementedError

    def at(self, z):
        """The likelihood for many products at the same `z`."""
        return self

    def hessian_product(self, z, v):
        """`F(z) v` at every position, shaped like `z`."""
        raise NotImplementedError

    def sqrt_product(self, z, u):
        """`S u` at every position, where `S S^T = F(z)`, shaped like `z`."""
        raise NotImplementedError

    def sampled_sqrt(self, z, seed):
        """A random vector at every position whose second moment is `F(z)`."""
        return self.score(z, ops.stop_gradient(self.sample(z, seed)))


def positive(x):
    """`x`, kept away from zero so that dividing by it stays finite."""
    return ops.maximum(x, ops.cast(1e-30, x.dtype))


def inside(p):
    """Whether a probability is one that Keras's losses do not clip, a boolean tensor.

    Beyond `epsilon` and `1 - epsilon` they are flat: no gradient and no curvature.
    """
    epsilon = keras.config.epsilon()
    return ops.logical_and(p > epsilon, p < 1.0 - epsilon)


class CounterSeed(keras.random.SeedGenerator):
    """A seed that is a function of a counter, so that it has no state to be saved.

    Args:
        seed: Python integer.
        counter: Integer scalar tensor, such as an optimizer's `iterations`.
        stream: Python integer that keeps different uses apart.
    """

    # The parent's constructor would create a variable; none is wanted.
    def __init__(self, seed: int, counter, stream: int = 0):
        self._words = (seed * 1_000_003 + stream * 7919, counter)

    def next(self, ordered=True):
        """The next pair of seed words; each call moves to a new stream."""
        fixed, counter = self._words
        self._words = (fixed + 104_729, counter)
        low = ops.cast(fixed % 2_147_483_647, "uint32")
        # An odd multiplier spreads the counter over all bits, so that backends which
        # add the two words together do not see neighbouring streams overlap.
        high = ops.cast(counter, "uint32") * ops.cast(2_654_435_761, "uint32")
        return ops.stack([low, high])
