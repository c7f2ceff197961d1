"""Whole steps of the optimizers that solve by products, dense, in NumPy and float64.

Written on `oracle`, without the package. `B` is a damped curvature matrix, `g` the
gradient, and `w` the weights of the examples in the objective, as there.
"""

import math
from typing import NamedTuple

import numpy as np
import oracle


class Minimum(NamedTuple):
    x: np.ndarray
    iterations: int
    evaluations: int


def bfgs(f, x, H, iterations, evaluations=60, gtol=1e-5):
    """BFGS in the product form, with halving until the Armijo condition holds."""
    (value, g), identity = f(x), np.eye(len(x))
    goal, count, done = gtol * np.linalg.norm(g), 1, 0
    while done < iterations and count < evaluations:
        p, t = -H @ g, 1.0
        while count < evaluations:
            (new, g_new), count = f(x + t * p), count + 1
            if new <= value + 1e-4 * t * (p @ g):
                break
            t /= 2
        else:
            break
        s, y = t * p, g_new - g
        if s @ y > 1e-8 * np.linalg.norm(s) * np.linalg.norm(y):
            left = identity - np.outer(s, y) / (s @ y)
            H = left @ H @ left.T + np.outer(s, s) / (s @ y)
        x, value, g, done = x + s, new, g_new, done + 1
        if np.linalg.norm(g) <= goal:
            break
    return Minimum(x, done, count)


def conjugate_gradient(B, b, x, M, iterations, epsilon):
    """The kept iterates `[(number, x, q), ...]`; `M` is the diagonal of a matrix."""
    wanted = {math.ceil(1.3**i) for i in range(100)}
    r = B @ x - b
    y = r / M
    p, rho, number = -y, r @ y, 0
    history, path = [0.5 * (r - b) @ x], [x]
    while number < iterations:
        curvature = p @ B @ p
        if curvature <= 0:
            break
        alpha = rho / curvature
        x, r = x + alpha * p, r + alpha * B @ p
        y = r / M
        rho, before = r @ y, rho
        p, number = -y + rho / before * p, number + 1
        history.append(0.5 * (r - b) @ x)
        path.append(x)
        k, q = max(10, math.ceil(round(0.1 * number, 9))), history[-1]
        if number > k and q < 0 and (q - history[number - k]) / q < k * epsilon:
            break
    kept = [i for i in range(1, number) if i in wanted] + [number]
    return [(i, path[i], history[i]) for i in kept]


class Report(NamedTuple):
    update: np.ndarray
    damping: float
    rho: float
    step_length: float
    iterate: int  # the CG iteration that was chosen


class TruncatedNewton:
    """Steps with `lambda` from the first loss, and the whole batch in all parts.

    Args:
        layers: The network.
        kind: The loss.
        learning_rate: A number.
    """

    def __init__(self, layers, kind, learning_rate=1.0):
        self.layers, self.kind = layers, kind
        self.learning_rate, self.damping = learning_rate, None
        self.start = np.zeros_like(oracle.flat(layers))

    def solve(self, x, y, w, g):
        """`(delta, q(delta), iterate)`, with `q` of the damped model."""
        raise NotImplementedError

    def step(self, x, y, w):
        layers, kind = self.layers, self.kind
        before = oracle.objective(layers, kind, x, y, w)
        g = oracle.gradient(layers, kind, x, y, w)
        if self.damping is None:
            self.unit = min(abs(before), 1000 * (g @ g) / abs(before))
            self.damping = 0.1 * self.unit
        self.change = lambda d: (
            oracle.objective(oracle.moved(layers, d), kind, x, y, w) - before
        )
        delta, q, iterate = self.solve(x, y, w, g)
        slope, t = g @ delta, 1.0
        if slope >= 0:
            t = 0.0
        while t > 0 and not self.change(t * delta) <= 1e-2 * t * slope:
            t *= 0.8
        curvature = 2.0 * (q - slope)
        rho = 0.0
        if t > 0:
            rho = self.change(t * delta) / (t * slope + 0.5 * t * t * curvature)
        report = Report(self.learning_rate * t * delta, self.damping, rho, t, iterate)
        if rho > 3 / 4:
            self.damping *= 2 / 3
        elif rho < 1 / 4:
            self.damping *= 3 / 2
        self.damping = max(self.damping, 1e-6 * self.unit)
        self.layers = oracle.moved(layers, report.update)
        return report


def eta(layers):
    return np.concatenate([layer.eta.ravel() for layer in layers])


def hessian(layers, kind, x, y, w, width=1e-5):
    """Central differences of the gradient; their error is about 1e-10."""
    columns = []
    for e in np.eye(len(oracle.flat(layers))):
        ahead, behind = (
            oracle.gradient(oracle.moved(layers, s * width * e), kind, x, y, w)
            for s in (1, -1)
        )
        columns.append((ahead - behind) / (2 * width))
    H = np.stack(columns, axis=1)
    return (H + H.T) / 2


def example_gradients(layers, kind, x, y):
    """Of every example's `-log p`, which the loss is `constant` times, (N, P)."""
    z = oracle.run(layers, x).z
    constant = 2.0 / z.shape[-1] if kind == "mse" else oracle.share(kind, z)
    score = oracle.loss_gradient(kind, z, y) / constant
    return np.einsum("nk,nkp->np", score, oracle.jacobian(layers, x)), constant


def empirical_diagonal(layers, kind, x, y, w):
    rows, constant = example_gradients(layers, kind, x, y)
    return np.einsum("n,np->p", w * constant, rows**2)


def covariance(layers, kind, x, y, w):
    rows, constant = example_gradients(layers, kind, x, y)
    w = w * constant
    mean = w @ rows
    return np.einsum("n,np,nq->pq", w, rows, rows) - np.outer(mean, mean) / w.sum()


def hidden_curvature(layers, upto, x):
    """`mean_n J_n^T J_n` of the activations of the layer before number `upto`."""
    J = oracle.jacobian(layers[:upto], x)
    J = np.pad(J, ((0, 0), (0, 0), (0, len(oracle.flat(layers)) - J.shape[-1])))
    return np.einsum("nkp,nkq->pq", J, J) / len(x)


class HessianFree(TruncatedNewton):
    """Conjugate gradients on `C + lambda D`, and back over their iterates.

    Args:
        curvature: "gauss_newton", "fisher" or "hessian".
        diagonal: Whether `D` is the diagonal, with a tenth of its mean.
        preconditioner: None, "empirical" or "gauss_newton" (of one output only).
        structural: `mu`, on the activations of the first layer.
    """

    def __init__(
        self,
        *args,
        curvature="gauss_newton",
        diagonal=False,
        preconditioner=None,
        structural=0.0,
        iterations=20,
        epsilon=1e-9,
        warm_start=0.95,
        **kwargs,
    ):
        super().__init__(*args, **kwargs)
        self.curvature, self.diagonal = curvature, diagonal
        self.preconditioner, self.structural = preconditioner, structural
        self.iterations, self.epsilon = iterations, epsilon
        self.warm_start = warm_start

    def solve(self, x, y, w, g):
        layers, kind, damping = self.layers, self.kind, self.damping
        fisher = oracle.fisher(layers, kind, x, w)
        C = {
            "gauss_newton": lambda: fisher + np.diag(eta(layers)),
            "fisher": lambda: fisher,
            "hessian": lambda: hessian(layers, kind, x, y, w),
        }[self.curvature]()
        if self.structural:
            C = C + damping * self.structural * hidden_curvature(layers, 1, x)
        d = np.diag(fisher)
        if self.preconditioner == "empirical":
            d = empirical_diagonal(layers, kind, x, y, w)
        D = d + 0.1 * d.mean() if self.diagonal else np.ones_like(d)
        B = C + damping * np.diag(D)
        M = np.ones_like(d) if self.preconditioner is None else (d + damping) ** 0.75
        start = self.warm_start * self.start
        if 0.5 * start @ B @ start + g @ start > 0:
            start = np.zeros_like(start)
        kept = conjugate_gradient(B, -g, start, M, self.iterations, self.epsilon)
        self.start = kept[-1][1]
        row = len(kept) - 1
        values = [self.change(x) for _, x, _ in kept]
        while row > 0 and values[row - 1] < values[row]:
            row -= 1
        number, delta, q = kept[row]
        return delta, q, number


class NaturalGradient(TruncatedNewton):
    """`-(G + lambda I)^-1 g`, with `G` on the batch or on data of its own.

    Args:
        metric: "fisher" or "covariance".
        data: `(x, y)`, or None for the batch.
    """

    def __init__(self, *args, metric="fisher", data=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.metric, self.data = metric, data

    def solve(self, x, y, w, g):
        if self.data is not None:  # which weigh as much as the batch
            x, y = self.data
            w = np.full(len(x), w.sum() / len(x))
        if self.metric == "fisher":
            G = oracle.fisher(self.layers, self.kind, x, w)
        else:
            G = covariance(self.layers, self.kind, x, y, w)
        B = G + self.damping * np.eye(len(g))
        delta = -np.linalg.solve(B, g)
        return delta, 0.5 * delta @ B @ delta + g @ delta, 0


class KrylovSubspaceDescent:
    """BFGS in the span of `g, C g, ...` and the step before."""

    def __init__(self, layers, kind, basis_size, bfgs_iterations, curvature):
        self.layers, self.kind, self.curvature = layers, kind, curvature
        self.basis_size, self.bfgs_iterations = basis_size, bfgs_iterations
        self.previous = None

    def step(self, x, y, w):
        layers, kind = self.layers, self.kind
        g = oracle.gradient(layers, kind, x, y, w)
        C = oracle.fisher(layers, kind, x, w)
        if self.curvature == "gauss_newton":
            C = C + np.diag(eta(layers))
        spanning = [g]
        while len(spanning) < self.basis_size:
            v = C @ spanning[-1]
            spanning.append(v / np.linalg.norm(v))
        if self.previous is not None:
            spanning.append(self.previous)
        K = np.linalg.qr(np.stack(spanning, axis=1))[0]
        values, vectors = np.linalg.eigh(K.T @ C @ K)
        values = np.abs(values) + 1e-3 * np.abs(values).max()
        H0 = vectors / values @ vectors.T

        def f(c):
            there = oracle.moved(layers, K @ c)
            slope = oracle.gradient(there, kind, x, y, w)
            return oracle.objective(there, kind, x, y, w), K.T @ slope

        found = bfgs(f, np.zeros(K.shape[1]), H0, self.bfgs_iterations)
        self.previous = K @ found.x
        self.layers = oracle.moved(layers, self.previous)
        return self.previous
