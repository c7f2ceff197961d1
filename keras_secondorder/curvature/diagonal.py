"""Blocks for variables that have no Kronecker factors."""

import math
from collections.abc import Callable

from keras import ops

from keras_secondorder.capture import Block
from keras_secondorder.curvature.factor import FLOAT32_EPS, in_units_of


class DiagonalBlock:
    """A diagonal block of the Fisher matrix.

    ```
    D = E[(dL/dtheta)^2],   U = V / (D + lambda)
    ```

    Its statistics are the squares of the summed gradient of one sampled batch. The
    samples are independent over examples and have mean zero, so the cross terms vanish
    in expectation and no gradient of a single example is needed.

    Args:
        plan: The block's entry in the plan; it covers one variable.
        add_variable: The optimizer's `add_variable`.
    """

    wrapper = None
    inverts_moments = False
    #: Whether a damping is in units of the mean of `D`.
    relative = False

    def __init__(self, plan: Block, add_variable: Callable):
        self.variables = plan.variables
        (variable,) = plan.variables
        name = f"{variable.path.replace('/', '_')}_diagonal"
        self.D = add_variable(variable.shape, "zeros", "float32", name=name)

    @property
    def factors(self) -> list:
        """The running statistics, variables `[D]`."""
        return [self.D]

    moments: list = []
    inverses: list = []

    def damping(self, damping):
        """`lambda` of this block, a scalar."""
        return in_units_of(_mean(self.D), damping, self.relative)

    def precondition(self, gradient: list, inverses: list, damping, rows=None) -> list:
        """`V / (D + damping)`.

        Args:
            gradient: A list with the gradient of the variable.
            inverses: Not used.
            damping: `lambda` plus the curvature of the L2 penalty.
            rows: Not used.
        """
        # As for a factor, never by less than rounding; and never 0 / 0.
        D = ops.convert_to_tensor(self.D)
        damping = ops.maximum(damping, FLOAT32_EPS * ops.max(D, initial=0.0) + 1e-30)
        return [ops.cast(gradient[0], "float32") / (D + damping)]

    def multiply(self, v: list) -> list:
        """`D V`, for a list with one tensor."""
        return [ops.convert_to_tensor(self.D) * ops.cast(v[0], "float32")]


def _mean(D):
    """The mean of the entries; 0 where there are none."""
    return ops.sum(D) / max(1, math.prod(D.shape))


class IdentityBlock:
    """A block that leaves the gradient as it is.

    Args:
        plan: The block's entry in the plan.
    """

    wrapper = None
    inverts_moments = True  # nothing is damped
    factors: list = []
    moments: list = []
    inverses: list = []

    def __init__(self, plan: Block):
        self.variables = plan.variables

    def damping(self, damping):
        """`lambda` as it is."""
        return damping

    def precondition(self, gradient: list, inverses: list, damping, rows=None) -> list:
        """The gradient itself."""
        return [ops.cast(g, "float32") for g in gradient]

    def multiply(self, v: list) -> list:
        """The vector itself."""
        return [ops.cast(a, "float32") for a in v]
