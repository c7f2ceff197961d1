"""The block-tridiagonal approximation: each layer given the one that follows."""

from collections.abc import Callable

from keras import ops

from keras_secondorder import vectors
from keras_secondorder.capture import Block
from keras_secondorder.curvature.block_diagonal import BlockDiagonal, Inverses
from keras_secondorder.curvature.kronecker import KroneckerBlock
from keras_secondorder.curvature.kronecker_difference import (
    joint_roots,
    solve_difference,
)


class ChainedBlock(KroneckerBlock):
    """The block of a layer `i` whose output goes to the layer `j = i + 1` alone.

    ```
    A_ij, G_ij = E[a_i a_j^T], E[g_i g_j^T]               # beside A_i and G_i
    Psi_A, Psi_G = A_ij A_j^-1, G_ij G_j^-1
    Sigma = A_i (x) G_i - Psi_A A_j Psi_A^T (x) Psi_G G_j Psi_G^T
    ```

    `Psi_A (x) Psi_G` predicts the gradient of `i` from that of `j`, and `Sigma` is the
    covariance of what is left. All of `A_i`, `G_i`, `A_j` and `G_j` are damped. Where
    the block before it keeps an inverse of its factors, this one keeps `Sigma`'s
    factors and both `Psi`.

    Args:
        plan: The block's entry in the plan; it has a successor.
        add_variable: The optimizer's `add_variable`.
        sharing: As for the other blocks; chained layers have one position.

    References:
        Martens (2016), thesis, section 6.4.3.
    """

    inverts_moments = False

    def __init__(self, plan: Block, add_variable: Callable, sharing: str = "expand"):
        super().__init__(plan, add_variable, sharing)
        name, own, other = plan.layer_name, plan.wrapper, plan.successor
        sizes = {"A": (own.d_in, other.d_in), "G": (own.d_out, other.d_out)}

        def variables(what, shape_of):
            return [
                add_variable(
                    shape_of(*pair), "zeros", "float32", name=f"{name}_{k}_{what}"
                )
                for k, pair in sizes.items()
            ]

        self._cross = variables("cross", lambda i, j: (i, j))
        self._eigenvalues = variables("eigenvalues", lambda i, j: (i,))
        self._psi = variables("psi", lambda i, j: (i, j))

    @property
    def factors(self) -> list:
        """The running statistics, variables `[A_i, A_ij, G_i, G_ij]`."""
        return [*self._A, self._cross[0], *self._G, self._cross[1]]

    @property
    def inverses(self) -> list:
        """Variables `[K_A, s_A, K_G, s_G, Psi_A, Psi_G]`; see `solve_difference`."""
        (K_A, K_G), (s_A, s_G) = super().inverses, self._eigenvalues
        return [K_A, s_A, K_G, s_G, *self._psi]

    def input_statistics(self, inputs: list, weights) -> list:
        """`[A_i, A_ij]` of one batch, from the inputs of both layers."""
        a_i, a_j = inputs
        A = super().input_statistics([a_i], weights)
        share = ops.reshape(weights, (-1, 1))
        rows = ops.reshape(self.wrapper.input_rows(a_i), (-1, self.wrapper.d_in))
        other = self.successor.input_rows(a_j)
        other = ops.reshape(other, (-1, self.successor.d_in))
        return [*A, ops.matmul(ops.transpose(share * rows), other)]

    def gradient_statistics(self, inputs: list, taps: list, weights) -> list:
        """`[G_i, G_ij]` of one batch, from the gradients at both pre-activations."""
        g_i, g_j = taps
        G = super().gradient_statistics(inputs, [g_i], weights)
        rows = ops.reshape(self.wrapper.gradient_rows(g_i), (-1, self.wrapper.d_out))
        other = self.successor.gradient_rows(g_j)
        other = ops.reshape(other, (-1, self.successor.d_out))
        return [*G, ops.matmul(ops.transpose(rows), other)]

    def systems(self, factors: list, gamma, eta: float) -> tuple:
        """`(matrices, dampings)` of `A_i` and `G_i`, as for a block of its own."""
        return super().systems([factors[0], factors[2]], gamma, eta)

    def precondition(self, gradient: list, inverses: list, damping, rows=None) -> list:
        """`Sigma^-1 V`, tensors shaped like the block's variables.

        Args:
            gradient: Tensors shaped like the block's variables.
            inverses: Values of `inverses`.
            damping: Not used: the damping is in the inverses.
            rows: Not used.
        """
        K_A, s_A, K_G, s_G = inverses[:4]
        V = self.wrapper.to_matrix(gradient)
        U = solve_difference(V, (K_A, s_A), (K_G, s_G))
        # An input that was always zero has no part in the others; rounding would
        # give it one.
        A, G = vectors.values([self.A, self.G])
        U = ops.where(_touched(A, V)[:, None], U, 0.0)
        U = ops.where(_touched(G, ops.transpose(V))[None], U, 0.0)
        return self.wrapper.from_matrix(U)


def _touched(factor, V):
    """Where a factor's diagonal or a row of `V` is not zero."""
    return ops.logical_or(ops.diagonal(factor) > 0, ops.any(V != 0, axis=1))


class BlockTridiagonal(BlockDiagonal):
    """The curvature of a network whose neighbouring layers are seen together.

    ```
    F^-1 = Xi^T Lambda Xi,   Lambda = diag(Sigma_1^-1, ..., Sigma_(L-1)^-1, F_L^-1)
    Xi V = V_i - Psi_A V_(i+1) Psi_G^T for each layer i with a successor
    ```

    Blocks outside of chains are as in the block-diagonal form. A chain of which one
    inverse failed keeps the old `Sigma` and `Psi` of that block; the product stays
    positive definite with any `Psi`.

    Args:
        *arguments: Those of `BlockDiagonal`.

    References:
        Martens (2016), thesis, sections 6.4.3 and 6.6, and appendix B.2; Martens &
        Grosse (2015), section 4.3 and appendix B.
    """

    chained = ChainedBlock

    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        index = {id(b.wrapper): i for i, b in enumerate(self.blocks)}
        #: `(i, j)` for each block with a successor, in the order of the model.
        self.links = [
            (i, index[id(b.successor)])
            for i, b in enumerate(self.blocks)
            if isinstance(b, ChainedBlock)
        ]

    def _fresh(self, gamma) -> list:
        fresh = super()._fresh(gamma)
        matrices, dampings, explained, psi = [], [], [], []
        for i, j in self.links:
            factors = vectors.values(self.blocks[i].factors)
            eta = self.eta[self.places[i][0]]
            own = self.blocks[i].systems(factors, gamma, eta)
            matrices += own[0]
            dampings += own[1]
            for cross, inverse in zip(factors[1::2], fresh[j], strict=True):
                psi.append(ops.matmul(cross, inverse))
                explained.append(ops.matmul(psi[-1], ops.transpose(cross)))
        roots = joint_roots(matrices, dampings, explained, self._compiled)
        values = list(fresh)
        for n, (i, _) in enumerate(self.links):
            (K_A, s_A), (K_G, s_G) = roots[2 * n : 2 * n + 2]
            values[i] = [K_A, s_A, K_G, s_G, *psi[2 * n : 2 * n + 2]]
        return values

    def precondition(self, gradient, inverses: Inverses, damping, inputs, taps) -> list:
        """`Xi^T Lambda Xi` times the gradient; arguments as in the base class."""
        V = list(gradient)
        for i, j in self.links:  # V_j as it came: of all rows at once
            Psi_A, Psi_G = inverses.values[i][4:]
            predicted = Psi_A @ self._matrix(gradient, j) @ ops.transpose(Psi_G)
            self._subtract(V, i, predicted)
        U = super().precondition(V, inverses, damping, inputs, taps)
        result = list(U)
        for i, j in self.links:
            Psi_A, Psi_G = inverses.values[i][4:]
            passed_on = ops.transpose(Psi_A) @ self._matrix(U, i) @ Psi_G
            self._subtract(result, j, passed_on)
        return result

    def _matrix(self, values, block):
        wrapper = self.blocks[block].wrapper
        return wrapper.to_matrix([values[k] for k in self.places[block]])

    def _subtract(self, values, block, matrix):
        parts = self.blocks[block].wrapper.from_matrix(matrix)
        for k, part in zip(self.places[block], parts, strict=True):
            values[k] = ops.cast(values[k], "float32") - part
