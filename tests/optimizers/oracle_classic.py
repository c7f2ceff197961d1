"""Whole steps of the classic optimizers, dense, in NumPy and float64.

Written on `oracle`, without the package. Each class has `step(x, y, w)`, which returns
the update and moves the network.
"""

import numpy as np
import oracle
import oracle_steps


def gauss_newton(layers, kind, x, w):
    return oracle.fisher(layers, kind, x, w) + np.diag(oracle_steps.eta(layers))


class Classic:
    """A network and a loss, with the update of a step to come from `propose`."""

    def __init__(self, layers, kind):
        self.layers, self.kind, self.k = layers, kind, 0
        self.P = len(oracle.flat(layers))

    def propose(self, x, y, w, g):
        raise NotImplementedError

    def gradient(self, x, y, w, delta=0.0):
        there = oracle.moved(self.layers, delta * np.ones(self.P))
        return oracle.gradient(there, self.kind, x, y, w)

    def change(self, delta, x, y, w):
        before = oracle.objective(self.layers, self.kind, x, y, w)
        there = oracle.moved(self.layers, delta)
        return oracle.objective(there, self.kind, x, y, w) - before

    def step(self, x, y, w):
        update = self.propose(x, y, w, self.gradient(x, y, w))
        self.layers, self.k = oracle.moved(self.layers, update), self.k + 1
        return update


class LevenbergMarquardt(Classic):
    def __init__(self, layers, kind, scaled=True, accelerated=True, damping=None):
        super().__init__(layers, kind)
        self.scaled, self.accelerated = scaled, accelerated
        self.damping, self.fixed = damping, damping is not None
        self.D = np.zeros(self.P)

    def matrix(self, x, y, w):
        return gauss_newton(self.layers, self.kind, x, w)

    def solve(self, B, v):
        return np.linalg.solve(B + self.damping * np.diag(self.D), v)

    def second(self, delta, B, x, w):
        """The correction for the second derivative of the outputs along `delta`."""

        def outputs(share):
            return oracle.run(oracle.moved(self.layers, share * delta), x).z

        z, h = outputs(0.0), 0.1
        J = oracle.jacobian(self.layers, x)
        bend = 2 / h * ((outputs(h) - z) / h - J @ delta)
        H = oracle.output_fisher(self.kind, z)
        a = -0.5 * self.solve(B, np.einsum("n,nkp,nkl,nl->p", w, J, H, bend))
        short = np.linalg.norm(a) <= 0.375 * np.linalg.norm(delta)
        return a if short else 0.0 * a

    def propose(self, x, y, w, g):
        B = self.matrix(x, y, w)
        self.D = np.maximum(self.D, np.diag(B)) if self.scaled else np.ones(self.P)
        self.D = np.maximum(self.D, 1e-7 * self.D.max())  # of inputs that are zero
        if self.damping is None:
            first = 0.1 * oracle.objective(self.layers, self.kind, x, y, w)
            self.damping = 1e-3 if self.scaled else first
        for _ in range(10):
            delta = -self.solve(B, g)
            predicted = g @ delta + 0.5 * delta @ B @ delta
            if self.accelerated:
                delta = delta + self.second(delta, B, x, w)
            if self.fixed:
                return delta
            change = self.change(delta, x, y, w)
            rho = change / predicted
            self.damping *= 0.5 if rho > 3 / 4 else 2.0 if rho < 1 / 4 else 1.0
            if change < 0:
                return delta
        return np.zeros(self.P)


class Newton(LevenbergMarquardt):
    def __init__(self, layers, kind, negative, damping=None):
        super().__init__(layers, kind, False, False, damping)
        self.negative = negative

    def matrix(self, x, y, w):
        return oracle_steps.hessian(self.layers, self.kind, x, y, w)

    def solve(self, B, v):
        if self.negative == "absolute":
            e, Q = np.linalg.eigh(B)
            B = Q @ np.diag(abs(e)) @ Q.T
        elif self.negative == "shift":
            B = B - min(np.linalg.eigvalsh(B)[0], 0.0) * np.eye(self.P)
        return super().solve(B, v)


class DiagonalGaussNewton(Classic):
    """With "empirical" squares, or those of one output: no sign matters to them."""

    def __init__(self, layers, kind, rate, damping, empirical):
        super().__init__(layers, kind)
        self.rate, self.damping, self.empirical = rate, damping, empirical
        self.D = np.zeros(self.P)

    def propose(self, x, y, w, g):
        if self.empirical:
            d = oracle_steps.empirical_diagonal(self.layers, self.kind, x, y, w)
        else:
            d = np.diag(oracle.fisher(self.layers, self.kind, x, w))
        eps = min(1 - 1 / (self.k + 1), 0.95)
        self.D = eps * self.D + (1 - eps) * d
        return -self.rate * g / (self.D + oracle_steps.eta(self.layers) + self.damping)


class StochasticMetaDescent(Classic):
    def __init__(self, layers, kind, initial, meta, forgetting):
        super().__init__(layers, kind)
        self.meta, self.forgetting = meta, forgetting
        self.p, self.v = np.full(self.P, initial), np.zeros(self.P)

    def propose(self, x, y, w, g):
        C = gauss_newton(self.layers, self.kind, x, w)
        factor = 1 + self.meta * self.v * -g
        self.p = self.p * np.minimum(np.maximum(factor, 0.5), 2.0)
        inside = -g - self.forgetting * C @ self.v
        self.v = self.forgetting * self.v + self.p * inside
        return -self.p * g


class MatrixMomentum(Classic):
    def __init__(self, layers, kind, rate, damping, epsilon):
        super().__init__(layers, kind)
        self.rate, self.damping, self.epsilon = rate, damping, epsilon
        self.v = np.zeros(self.P)

    def propose(self, x, y, w, g):
        C = gauss_newton(self.layers, self.kind, x, w)
        momentum = np.eye(self.P) - self.epsilon * (C + self.damping * np.eye(self.P))
        self.v = momentum @ self.v - self.epsilon * g
        return self.rate * self.v


class SGDQN(Classic):
    def __init__(self, layers, kind, rate, damping, interval):
        super().__init__(layers, kind)
        self.rate, self.damping, self.interval = rate, damping, interval
        self.B, self.updates = np.full(self.P, 0.01 / damping), 0

    def propose(self, x, y, w, g):
        step = -self.rate * self.B * g
        if self.k % self.interval == 0:
            curvature = (self.gradient(x, y, w, step) - g) / step
            r = 1 / np.clip(curvature, self.damping, 100 * self.damping)
            self.B = self.B + 2 / (2 + self.updates) * (r - self.B)
            self.updates += 1
        return step


class RProp(Classic):
    def __init__(self, layers, kind, initial):
        super().__init__(layers, kind)
        self.steps, self.before = np.full(self.P, initial), np.zeros(self.P)

    def propose(self, x, y, w, g):
        g = g.copy()
        for i in range(self.P):
            if g[i] * self.before[i] > 0:
                self.steps[i] = min(1.2 * self.steps[i], 50.0)
            elif g[i] * self.before[i] < 0:
                self.steps[i], g[i] = max(0.5 * self.steps[i], 1e-6), 0.0
        self.before = g
        return -np.sign(g) * self.steps


class AdaptiveRates(Classic):
    def __init__(self, layers, kind, rule, initial):
        super().__init__(layers, kind)
        self.rule, self.before = rule, np.zeros(self.P)
        self.rates, self.s = np.full(self.P, initial), None

    def propose(self, x, y, w, g):
        agreement = g * self.before
        if self.rule == "sign":
            up, down = agreement > 0, agreement < 0
            factor = np.select([up, down], [1.2, 0.7], 1.0)
        else:
            self.s = g**2 if self.s is None else 0.9 * self.s + 0.1 * g**2
            factor = np.clip(1 + 0.1 * agreement / self.s, 0.5, 2.0)
        self.rates, self.before = self.rates * factor, g
        return -self.rates * g
