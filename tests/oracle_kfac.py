"""Whole steps of K-FAC, dense, in NumPy and float64.

Written on `oracle`, without the package.
"""

from typing import NamedTuple

import numpy as np
import oracle

MAX_DECAY = 0.95  # the largest weight of the past in the running averages


class Report(NamedTuple):
    """What one step did; the scalars are those in force during the step."""

    update: np.ndarray
    alpha: float
    mu: float
    damping: float
    gamma: float
    rho: float
    gradient: np.ndarray
    predicted: float  # by the damped model; NaN where it was not measured
    actual: float
    quadratic: float  # delta^T (F + diag(eta)) delta


class Kfac:
    """Whole steps of K-FAC with fresh statistics and inverses in each of them.

    Args:
        layers: The network.
        kind: The loss.
        damping: `lambda`, at the start if it is adapted.
        learning_rate: A number: trust-region rule. None: the adaptive rule.
        momentum: A number, or None for the adaptive rule's.
        norm_constraint: Bound of the trust-region rule.
        damping_every: T1, or None for a fixed `lambda`.
        gamma_every: T2, or None for `gamma = sqrt(lambda)`.
        relative: Whether `lambda` is in units of each block's mean eigenvalue.
        relative_step: `(fraction, steps)` of the bound on a layer's step.
    """

    def __init__(
        self,
        layers,
        kind,
        damping,
        learning_rate=None,
        momentum=None,
        norm_constraint=None,
        damping_every=None,
        gamma_every=None,
        relative=False,
        relative_step=None,
    ):
        self.layers, self.kind = layers, kind
        self.damping, self.gamma = damping, np.sqrt(damping)
        self.learning_rate, self.momentum = learning_rate, momentum
        self.norm_constraint = norm_constraint
        self.damping_every, self.gamma_every = damping_every, gamma_every
        self.relative, self.relative_step = relative, relative_step
        self.reference = np.inf
        self.previous = np.zeros_like(oracle.flat(layers))
        self.average = None
        self.steps = 0

    def step(self, x, y, w):
        self.steps += 1
        layers, kind = self.layers, self.kind
        eta = np.concatenate([layer.eta.ravel() for layer in layers])
        grad = oracle.gradient(layers, kind, x, y, w)
        self.loss = oracle.objective(layers, kind, x, y, w)
        if self.steps <= 10:
            constant = abs(oracle.uninformed(layers, kind, x, y, w))
            self.reference = min(self.reference, max(abs(self.loss), constant))
        self._average(self._statistics(x, w))
        ridge = self.damping * self._by_parameter(self._units())
        curvature = oracle.fisher(layers, kind, x, w) + np.diag(ridge + eta)
        if self.gamma_every is None:
            self.gamma = np.sqrt(self.damping)
            candidates = [self.gamma]
        else:
            candidates = self._gamma_candidates()

        def model(delta):
            return 0.5 * delta @ curvature @ delta + grad @ delta

        tried = []
        for gamma in candidates:
            U = self._precondition(grad, gamma)
            shares = self._shares(U)
            alpha, mu = self._coefficients(U, grad, curvature, shares)
            direction = alpha * shares * U + mu * self.previous
            tried.append((model(-direction), gamma, alpha, mu, direction))
        predicted, self.gamma, alpha, mu, direction = min(tried, key=lambda t: t[0])

        lr = 1.0 if self.learning_rate is None else self.learning_rate
        update = -lr * direction
        rho, damping = np.nan, self.damping
        measured = (np.nan, np.nan, np.nan)
        if self.damping_every and self.steps % self.damping_every == 0:
            after = oracle.moved(layers, update)
            change = oracle.objective(after, kind, x, y, w) - self.loss
            rho = change / model(update)
            undamped = update @ curvature @ update - ridge * update @ update
            measured = (model(update), change, undamped)
            omega = (19 / 20) ** self.damping_every
            if rho > 3 / 4:
                self.damping = omega * damping
            elif rho < 1 / 4:
                self.damping = damping / omega
        self.previous = direction
        self.layers = oracle.moved(layers, update)
        return Report(update, alpha * lr, mu, damping, self.gamma, rho, grad, *measured)

    def _statistics(self, x, w):
        return oracle.factors(self.layers, self.kind, x, w)

    def _average(self, new):
        if self.average is None:
            self.average = new
        eps = min(1.0 - 1.0 / self.steps, MAX_DECAY)
        self.average = [
            tuple(eps * o + (1.0 - eps) * n for o, n in zip(old, fresh, strict=True))
            for old, fresh in zip(self.average, new, strict=True)
        ]

    def _gamma_candidates(self):
        if self.steps == 1 or (self.steps - 1) % self.gamma_every:
            return [self.gamma]
        omega = np.sqrt(19 / 20) ** self.gamma_every
        return [self.gamma, omega * self.gamma, self.gamma / omega]

    def _units(self):
        """What `lambda` is a multiple of, for each layer."""
        if not self.relative:
            return [1.0] * len(self.layers)
        pairs = [(m[0], m[len(m) // 2]) for m in self.average]
        return [np.trace(A) * np.trace(G) / (len(A) * len(G)) for A, G in pairs]

    def _strengths(self, gamma):
        """`gamma^2` of each layer with its penalty."""
        return [
            gamma**2 * unit + 2.0 * layer.l2
            for unit, layer in zip(self._units(), self.layers, strict=True)
        ]

    def _by_parameter(self, values):
        counts = [layer.eta.size for layer in self.layers]
        return np.repeat(np.array(values, float), counts)

    def _precondition(self, grad, gamma):
        blocks = []
        for strength, (A, G), V in zip(
            self._strengths(gamma),
            self.average,
            oracle.split(grad, self.layers),
            strict=True,
        ):
            A_inverse, G_inverse = oracle.damped_inverses(A, G, np.sqrt(strength))
            blocks.append((A_inverse @ V @ G_inverse).ravel())
        return np.concatenate(blocks)

    def _shares(self, U):
        """How much of each entry of U a step takes."""
        shares = [1.0] * len(self.layers)
        if self.relative_step is not None:
            fraction, steps = self.relative_step
            left = min(1.0, abs(self.loss) / self.reference)
            bound = fraction * left**0.25 * np.sqrt(min(1.0, steps / self.steps))
            vs = (oracle.split(v, self.layers) for v in (oracle.flat(self.layers), U))
            for i, (theta, u) in enumerate(zip(*vs, strict=True)):
                theta, u = (np.sqrt(np.mean(v**2)) for v in (theta, u))
                most = bound * max(theta, 0.03)
                shares[i] = min(1.0, most / (self.learning_rate * u))
        return self._by_parameter(shares)

    def _coefficients(self, U, grad, curvature, shares):
        """`(alpha, mu)` of the direction `alpha U + mu previous`."""
        if self.learning_rate is not None:
            bound = np.inf if self.norm_constraint is None else self.norm_constraint
            square = self.learning_rate**2 * (shares**2 * grad) @ U
            nu = min(1.0, np.sqrt(bound / square))
            return nu, self.momentum
        if not self.previous.any():
            return (grad @ U) / (U @ curvature @ U), 0.0
        span = np.stack([U, self.previous], axis=1)  # delta = -span [alpha mu]
        return tuple(np.linalg.solve(span.T @ curvature @ span, span.T @ grad))
