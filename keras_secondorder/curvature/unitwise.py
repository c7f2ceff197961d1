"""A block for scales and shifts: one small matrix for each unit."""

from collections.abc import Callable

from keras import ops

from keras_secondorder import vectors
from keras_secondorder.capture import Block
from keras_secondorder.curvature.factor import (
    in_units_of,
    mean_eigenvalue,
    zeros_of,
)


class UnitwiseBlock:
    """The Fisher matrix of the few parameters of each unit.

    ```
    F_u = E[v_u v_u^T],   v_u = (dL/dgamma_u, dL/dbeta_u) of one example
    U_u = (F_u + gamma^2 I)^-1 V_u
    ```

    Args:
        plan: The block's entry in the plan; its variables have one entry for each unit.
        add_variable: The optimizer's `add_variable`.

    References:
        Osawa et al. (2019), *Large-scale distributed second-order optimization using
        Kronecker-factored approximate curvature*, section 4.2.
    """

    #: Whether `gamma^2` is in units of the block's mean eigenvalue.
    relative = False
    #: No block follows it in a chain.
    successor = None

    def __init__(self, plan: Block, add_variable: Callable):
        self.variables = plan.variables
        self.wrapper = plan.wrapper
        ((self.side,),) = self.sides = plan.sides
        name = plan.layer_name
        self.F = zeros_of(self.side, add_variable, f"{name}_F")
        self.F_inverse = zeros_of(self.side, add_variable, f"{name}_F_inverse")

    #: Whether `inverses` are those of the damped `moments`.
    inverts_moments = True

    @property
    def factors(self) -> list:
        """The running statistics, variables `[F]`."""
        return [self.F]

    #: The second moments among the statistics: all of them.
    moments = factors

    @property
    def inverses(self) -> list:
        """The cached inverses of the damped matrices, variables."""
        return [self.F_inverse]

    def by_factor(self, inverses: list) -> list:
        """The inverse of each factor."""
        return inverses

    def input_statistics(self, inputs: list, weights) -> list:
        """Nothing: inputs and gradients enter together."""
        return []

    def gradient_statistics(self, inputs: list, taps: list, weights) -> list:
        """`F` of one batch.

        Args:
            inputs: What the wrapper recorded, one for each call.
            taps: Gradients at the outputs, one for each call, that carry the square
                root of the weight.
            weights: Weights of the examples; only their number is used.
        """
        v = 0.0
        for x, t in zip(inputs, taps, strict=True):
            positions = self.wrapper.parameter_gradients(x, t)  # (k, N, T, units)
            shape = (len(self.variables), ops.shape(weights)[0], -1, self.side.stack)
            v = v + ops.sum(ops.reshape(positions, shape), axis=2)
        v = ops.transpose(v, (2, 1, 0))  # (units, N, k)
        F = ops.matmul(ops.transpose(v, (0, 2, 1)), v)
        return [ops.reshape(F, self.side.shape)]

    def systems(self, factors: list, gamma, eta: float) -> tuple:
        """`(matrices, dampings)` whose damped inverses are this block's `inverses`."""
        return factors, self.dampings_of(factors, gamma, eta)

    def dampings_of(self, moments: list, gamma, eta: float) -> list:
        """What is added to the values of `moments`."""
        return [self._damping(moments[0], gamma**2) + eta]

    def damping(self, damping):
        """`lambda` of this block, a scalar."""
        return self._damping(*vectors.values(self.factors), damping)

    def _damping(self, F, damping):
        mean = ops.mean(mean_eigenvalue(F, self.side))
        return in_units_of(mean, damping, self.relative)

    def precondition(self, gradient: list, inverses: list, damping, rows=None) -> list:
        """`F^-1 V` within each unit.

        Args:
            gradient: Tensors shaped like the block's variables.
            inverses: `[F^-1]`.
            damping: Not used: the damping is in the inverse.
            rows: Not used.

        Returns:
            Tensors shaped like the block's variables.
        """
        flat = [ops.reshape(ops.cast(g, "float32"), (-1,)) for g in gradient]
        V = ops.stack(flat, axis=-1)[..., None]  # (units, k, 1)
        inverse = ops.reshape(inverses[0], (-1, self.side.size, self.side.size))
        U = ops.matmul(inverse, V)[..., 0]
        return [ops.reshape(U[:, i], v.shape) for i, v in enumerate(self.variables)]

    def multiply(self, v: list) -> list:
        """`F V` within each unit, for tensors shaped like the variables."""
        return self.precondition(v, vectors.values(self.factors), None)

    def rows(self, inputs: list, taps: list):
        """None: the gradient is no product of rows."""

    def rows_pay(self, rows) -> bool:
        """No."""
        return False
