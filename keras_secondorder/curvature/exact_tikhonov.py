"""Exact Tikhonov damping of the block-diagonal approximation."""

from collections.abc import Callable

from keras import ops

from keras_secondorder import vectors
from keras_secondorder.capture import Block, eigenvalue_shape
from keras_secondorder.curvature.block_diagonal import BlockDiagonal, Inverses
from keras_secondorder.curvature.eigenbasis import (
    coordinates,
    eigenbases,
    from_coordinates,
)
from keras_secondorder.curvature.factor import FLOAT32_EPS, TINY
from keras_secondorder.curvature.kronecker import KroneckerBlock


class EigenbasisBlock(KroneckerBlock):
    """A Kronecker block in its eigenbasis, where `lambda I` is added as it is.

    ```
    A = U_A diag(d_A) U_A^T,   G = U_G diag(d_G) U_G^T,   S = d_A d_G^T
    U = U_A [(U_A^T V U_G) / (S + lambda)] U_G^T
    ```

    Args:
        plan: The block's entry in the plan; it has a wrapper.
        add_variable: The optimizer's `add_variable`.
        sharing: "expand" or "reduce"; see `KroneckerBlock`.

    References:
        Martens (2016), thesis, section 6.6.3 and appendix B.2.
    """

    kept = "basis"
    has_eigenvalues = True
    inverts_moments = False

    def __init__(self, plan: Block, add_variable: Callable, sharing: str = "expand"):
        super().__init__(plan, add_variable, sharing)
        self.eigenvalues = [
            add_variable(
                eigenvalue_shape(pair),
                initializer="zeros",
                dtype="float32",
                name=f"{plan.layer_name}_eigenvalues{suffix}",
            )
            for pair, suffix in zip(self.sides, self._suffixes, strict=True)
        ]

    @property
    def inverses(self) -> list:
        """Bases and eigenvalues, variables `[U_A, U_G, S]`; all U_A first."""
        return [*self._kept, *self.eigenvalues]

    def systems(self, factors: list, gamma, eta: float) -> tuple:
        """Nothing is inverted."""
        return [], []

    def decomposed(self, pairs: list) -> list:
        """New values of `inverses`.

        Args:
            pairs: Eigenvalues and eigenvectors of all A, then of all G.
        """
        count, S = len(self.parts), []
        for i, sides in enumerate(self.sides):
            d = [
                ops.reshape(pairs[i + k * count][0], (-1, s.blocks * s.width))
                for k, s in enumerate(sides)
            ]
            outer = d[0][:, :, None] * d[1][:, None, :]
            S.append(ops.reshape(outer, eigenvalue_shape(sides)))
        return [*(basis for _, basis in pairs), *S]

    def precondition(self, gradient: list, inverses: list, damping, rows=None) -> list:
        """`U_A [(U_A^T V U_G) / (S + damping)] U_G^T` for the gradient of this block.

        Args:
            gradient: Tensors shaped like the block's variables.
            inverses: `[U_A, U_G, S]`; all U_A first for several maps.
            damping: `lambda` plus the curvature of the L2 penalty.
            rows: `(a, g)` with `V = a^T g`, where that is cheaper (thesis, end of 6.8).

        Returns:
            Tensors shaped like the block's variables.
        """
        count, results = len(self.parts), []
        for i, values in enumerate(self.wrapper.split(gradient)):
            part, sides = self.parts[i], self.sides[i]
            bases, S = (inverses[i], inverses[count + i]), inverses[2 * count + i]
            if rows is None:
                V = coordinates(part.to_matrix(values), bases, sides)
            else:
                a, g = (ops.matmul(r, U) for r, U in zip(rows, bases, strict=True))
                V = ops.matmul(ops.transpose(a), g)
            V = V / self.damped(S, damping, sides)
            results.append(part.from_matrix(from_coordinates(V, bases, sides)))
        return self.wrapper.join(results)

    def damped(self, S, damping, sides: tuple):
        """`S + damping`; as for a factor, never by less than rounding, nor 0 + 0."""
        largest = ops.max(S, axis=(-2, -1), keepdims=True)
        return S + ops.maximum(damping, FLOAT32_EPS * largest + TINY)


class ExactTikhonov(BlockDiagonal):
    """The block-diagonal approximation, with `lambda I` added to each block as it is.

    ```
    F_l + (lambda + eta) I = A_l (x) G_l + (lambda + eta) I
    ```

    Factored damping adds `gamma / pi A (x) I` and `pi gamma I (x) G` to this, and needs
    no eigenvectors. Here the damping enters when the inverse is applied, so that it may
    change without new ones.

    References:
        Martens (2016), thesis, section 6.6.3 and appendix B.2.
    """

    kronecker = EigenbasisBlock

    def redamped(self, inverses: Inverses, gamma) -> Inverses:
        """The same bases; only the inverses of unitwise blocks know the damping."""
        fresh = super()._fresh(gamma)
        values = [n or o for n, o in zip(fresh, inverses.values, strict=True)]
        return inverses._replace(values=values)

    def _fresh(self, gamma) -> list:
        fresh = super()._fresh(gamma)
        blocks = [b for b in self.blocks if isinstance(b, EigenbasisBlock)]
        moments = sum((b.moments for b in blocks), [])
        pairs = iter(eigenbases(vectors.values(moments), self._compiled))
        for i, block in enumerate(self.blocks):
            if isinstance(block, EigenbasisBlock):
                fresh[i] = block.decomposed([next(pairs) for _ in block.parts * 2])
        return fresh
