"""Eigenvalue-corrected K-FAC: the second moments of the gradient in the eigenbasis."""

from keras import ops

from keras_secondorder import vectors
from keras_secondorder.curvature.eigenbasis import moved
from keras_secondorder.curvature.exact_tikhonov import EigenbasisBlock, ExactTikhonov
from keras_secondorder.curvature.factor import TINY
from keras_secondorder.curvature.rows import gradient_rows, input_rows
from keras_secondorder.curvature.second_moments import (
    squared_gradients,
    squared_one_hot_gradients,
)


class CorrectedBlock(EigenbasisBlock):
    """A Kronecker block whose eigenvalues are those moments, and not products.

    ```
    S = E[(U_A^T (sum_t a_t g_t^T) U_G)^2]            # squared by entry
    U = U_A [(U_A^T V U_G) / (S + lambda)] U_G^T
    ```

    `S` is a running average in the basis of the moment. Where the basis is refreshed,
    `S` becomes the diagonal, in the new one, of the matrix that it stands for in the
    old. At the first basis it starts as `d_A d_G^T`, what K-FAC has in its place.

    The bases may be of any form: for a factor cut into blocks, they are those of the
    blocks, and for a diagonal one the axes themselves. `S` is exact in each of them.

    References:
        George, Laurent, Bouthillier, Ballas & Vincent (2018), *Fast approximate natural
        gradient descent in a Kronecker-factored eigenbasis*, sections 3.1 to 3.3. Their
        EKFAC-ra does not say what becomes of the running average at a new basis; their
        published code starts it again from `d_A d_G^T`. For layers with several
        positions, they too sum over the positions before they square.
    """

    @property
    def factors(self) -> list:
        """The running statistics, variables `[A, G, S]`; all A first, then all G."""
        return [*super().factors, *self.eigenvalues]

    def gradient_statistics(self, inputs: list, taps: list, weights) -> list:
        """`G` of one batch and `S` in the present basis, for each affine map.

        Args:
            inputs: The layer's inputs as recorded, one for each call.
            taps: Gradients at the pre-activations, one for each call, that carry the
                square root of the weight.
            weights: Weights of the examples; only their number is used.
        """
        G = super().gradient_statistics(inputs, taps, weights)
        bases, count = vectors.values(self._kept), len(self.parts)
        S = []
        for i, part in enumerate(self.parts):
            a = input_rows(part, inputs, weights)
            g = gradient_rows(part, taps, weights)
            basis = (bases[i], bases[count + i])
            if part.one_hot:
                S.append(squared_one_hot_gradients(a[..., 0], g, basis, self.sides[i]))
            else:
                S.append(squared_gradients(a, g, basis, self.sides[i]))
        return [*G, *S]

    def decomposed(self, pairs: list) -> list:
        """New bases, and the moments carried over to them."""
        fresh = super().decomposed(pairs)
        old, count = vectors.values(self.inverses), len(self.parts)
        for i, sides in enumerate(self.sides):
            before, now = ((v[i], v[count + i]) for v in (old, fresh))
            first = ops.logical_not(ops.any(before[0] != 0))
            place = 2 * count + i
            carried = moved(old[place], before, now, sides)
            fresh[place] = ops.where(first, fresh[place], carried)
        return fresh


class FactoredCorrectedBlock(CorrectedBlock):
    """The same, with the cross terms of factored damping.

    ```
    S + gamma / pi d_A 1^T + pi gamma 1 d_G^T + gamma^2
    ```

    For `S = d_A d_G^T` the means of its rows and columns are `d_A` and `d_G`, times the
    mean of the other, so that both cross terms are `gamma / sqrt(mean(S))` times a
    mean. Those of the corrected S take their place.
    """

    def damped(self, S, damping, sides: tuple):
        """`S` with `gamma^2 = damping` and the cross terms."""
        rows = ops.sum(S, axis=-1, keepdims=True) / sides[1].size
        columns = ops.sum(S, axis=-2, keepdims=True) / sides[0].size
        mean = ops.sum(rows, axis=-2, keepdims=True) / sides[0].size
        cross = ops.sqrt(damping / ops.maximum(mean, TINY)) * (rows + columns)
        return super().damped(S + cross, damping, sides)


class EigenvalueCorrected(ExactTikhonov):
    """The block-diagonal approximation in the Kronecker eigenbasis, EKFAC.

    ```
    F_l = (U_A (x) U_G) diag(S_l) (U_A (x) U_G)^T,   damped by (lambda + eta) I
    ```

    Of all matrices that are diagonal in this basis, `F_l` is the nearest to the Fisher
    block in the Frobenius norm, so that it is never farther from it than `A (x) G`.
    Unitwise and diagonal blocks are exact in what they keep; nothing is corrected
    there.

    References:
        George et al. (2018); see `CorrectedBlock`.
    """

    kronecker = CorrectedBlock


class FactoredEigenvalueCorrected(EigenvalueCorrected):
    """The same, with the cross terms of factored damping; see the block."""

    kronecker = FactoredCorrectedBlock
