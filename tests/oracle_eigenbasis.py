"""K-FAC with exact Tikhonov damping, and with corrected eigenvalues, dense in NumPy.

Written on `oracle`, without the package.
"""

import numpy as np
import oracle
import oracle_kfac


class ExactKfac(oracle_kfac.Kfac):
    """Whole steps with `(A (x) G + lambda I)^-1`."""

    def _blocks(self):
        return [np.kron(A, G) for A, G in self.average]

    def _precondition(self, grad, gamma):
        parts = oracle.split(grad, self.layers)
        strengths = self._strengths(gamma)
        return np.concatenate(
            [
                np.linalg.solve(F + strength * np.eye(len(F)), V.ravel())
                for strength, F, V in zip(strengths, self._blocks(), parts, strict=True)
            ]
        )


class CorrectedKfac(ExactKfac):
    """The same with the moments of the gradient along the Kronecker eigenvectors."""

    corrected = None

    def _statistics(self, x, w):
        self.fisher = oracle.fisher(self.layers, self.kind, x, w)
        return super()._statistics(x, w)

    def _average(self, new):
        super()._average(new)
        eps, end = min(1.0 - 1.0 / self.steps, oracle_kfac.MAX_DECAY), 0
        before = self.corrected or [None] * len(self.average)
        self.corrected = []
        for (A, G), last in zip(self.average, before, strict=True):
            start, end = end, end + len(A) * len(G)
            (a, U), (g, V) = np.linalg.eigh(A), np.linalg.eigh(G)
            W, s = np.kron(U, V), np.kron(a, g)
            if last is not None:
                old, kept = last
                moments = np.diag(old.T @ self.fisher[start:end, start:end] @ old)
                s = eps * kept + (1.0 - eps) * moments
                s = np.diag(W.T @ old * s @ old.T @ W)
            self.corrected.append((W, s))

    def _blocks(self):
        return [W * s @ W.T for W, s in self.corrected]
