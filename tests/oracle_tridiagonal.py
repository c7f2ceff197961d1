"""The block-tridiagonal form of K-FAC, dense, in NumPy and float64.

Written on `oracle`, without the package. A network is one chain; `moments` are
`[(A, A_ij, G, G_ij), ..., (A, G)]`, the last layer without a successor.
"""

import numpy as np
import oracle
import oracle_kfac


def moments(layers, kind, x, w):
    """The factors of one batch, with those between neighbours."""
    z, inputs, ds = oracle.run(layers, x)
    F = oracle.output_fisher(kind, z)
    own = oracle.factors(layers, kind, x, w)
    result = []
    for i in range(len(layers) - 1):
        A_ij = np.einsum("n,ni,nj->ij", w / w.sum(), inputs[i], inputs[i + 1])
        G_ij = np.einsum("n,nki,nkl,nlj->ij", w, ds[i], F, ds[i + 1])
        result.append((own[i][0], A_ij, own[i][1], G_ij))
    return [*result, own[-1]]


def damped(moments, strengths):
    """The moments with factored damping on the diagonal ones, `gamma^2` by layer."""
    result = []
    for (A, A_ij, G, G_ij), square in zip(_paired(moments), strengths, strict=True):
        strength, pi = np.sqrt(square), oracle.trace_norm_pi(A, G)
        A_d = A + pi * strength * np.eye(len(A))
        G_d = G + strength / pi * np.eye(len(G))
        result.append((A_d, A_ij, G_d, G_ij))
    return result


def _paired(moments):
    return [*moments[:-1], (moments[-1][0], None, moments[-1][1], None)]


def blocks_of(moments):
    """`F_ii` and `F_(i,i+1)` from (damped) moments."""
    diagonal = [np.kron(m[0], m[len(m) // 2]) for m in moments]
    above = [np.kron(m[1], m[3]) for m in moments[:-1]]
    return diagonal, above


def inverse(moments):
    """`Xi^T Lambda Xi`, from Psi and Sigma that are formed as whole blocks."""
    diagonal, above = blocks_of(moments)
    ends = np.cumsum([0, *(len(block) for block in diagonal)])
    place = [slice(a, b) for a, b in zip(ends, ends[1:], strict=False)]
    Xi, Lambda = np.eye(ends[-1]), np.zeros((ends[-1], ends[-1]))
    for i, F in enumerate(diagonal):
        Sigma = F
        if i + 1 < len(diagonal):
            Psi = above[i] @ np.linalg.inv(diagonal[i + 1])
            Sigma = F - Psi @ diagonal[i + 1] @ Psi.T
            Xi[place[i], place[i + 1]] = -Psi
        Lambda[place[i], place[i]] = np.linalg.inv(Sigma)
    return Xi.T @ Lambda @ Xi


class Kfac(oracle_kfac.Kfac):
    """Whole steps, as in the block-diagonal form but for the inverse."""

    def _statistics(self, x, w):
        return moments(self.layers, self.kind, x, w)

    def _precondition(self, grad, gamma):
        return inverse(damped(self.average, self._strengths(gamma))) @ grad
