"""K-FAC on dense matrices, in NumPy and float64, written without the package.

A network is a list of `Layer`. Parameters are one vector: the matrices
`W = [kernel; bias]` of shape (d_in [+ 1], d_out), each row by row, in order; for a
layer this is its kernel followed by its bias. `N` examples, `D` outputs, `P`
parameters. `w` are the weights of the examples in the objective:

    h(theta) = sum_n w_n loss(y_n, z_n) + sum_layers l2 |kernel|^2 + bias_l2 |bias|^2
"""

from typing import NamedTuple

import numpy as np

MAX_DECAY = 0.95  # the largest weight of the past in the running averages


class Layer(NamedTuple):
    W: np.ndarray
    activation: str = "linear"
    bias: bool = True
    l2: float = 0.0
    bias_l2: float = 0.0

    @property
    def eta(self):
        """The second derivative of the penalty for every entry of `W`."""
        eta = np.full(self.W.shape, 2.0 * self.l2)
        if self.bias:
            eta[-1] = 2.0 * self.bias_l2
        return eta


def flat(layers):
    return np.concatenate([layer.W.ravel() for layer in layers])


def split(vector, layers):
    """The parameter vector cut into one matrix for each layer."""
    sizes = np.cumsum([layer.W.size for layer in layers])[:-1]
    pieces = np.split(vector, sizes)
    return [p.reshape(q.W.shape) for p, q in zip(pieces, layers, strict=True)]


def moved(layers, delta):
    """The network at `theta + delta`."""
    steps = split(delta, layers)
    return [q._replace(W=q.W + d) for q, d in zip(layers, steps, strict=True)]


# --- the network -------------------------------------------------------------------


def sigmoid(s):
    return 0.5 * (1.0 + np.tanh(0.5 * s))


def softmax(s):
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def activate(name, s):
    return {
        "linear": lambda: s,
        "relu": lambda: np.maximum(s, 0.0),
        "tanh": lambda: np.tanh(s),
        "sigmoid": lambda: sigmoid(s),
        "exponential": lambda: np.exp(s),
        "softmax": lambda: softmax(s),
    }[name]()


def activation_jacobian(name, s):
    """`d activation / ds`, shape (N, d, d)."""
    if name == "softmax":
        p = softmax(s)
        return p[:, :, None] * np.eye(s.shape[1]) - p[:, :, None] * p[:, None, :]
    slope = {
        "linear": lambda: np.ones_like(s),
        "relu": lambda: (s > 0).astype(float),
        "tanh": lambda: 1.0 - np.tanh(s) ** 2,
        "sigmoid": lambda: sigmoid(s) * sigmoid(-s),
        "exponential": lambda: np.exp(s),
    }[name]()
    return slope[:, :, None] * np.eye(s.shape[1])


class Pass(NamedTuple):
    z: np.ndarray  # outputs, (N, D)
    a: list  # inputs of the layers with the 1 appended, (N, d_in + 1) each
    ds: list  # dz / d(pre-activation), (N, D, d_out) each


def run(layers, x):
    """The outputs, and what the layers see and contribute."""
    inputs, slopes, values = [], [], np.asarray(x, float)
    for layer in layers:
        a = np.hstack([values, np.ones((len(values), 1))]) if layer.bias else values
        s = a @ layer.W
        inputs.append(a)
        slopes.append(activation_jacobian(layer.activation, s))
        values = activate(layer.activation, s)
    ds, behind = [], np.broadcast_to(np.eye(values.shape[1]), slopes[-1].shape)
    for layer, slope in zip(reversed(layers), reversed(slopes), strict=True):
        here = behind @ slope
        ds.insert(0, here)
        kernel = layer.W[:-1] if layer.bias else layer.W
        behind = here @ kernel.T
    return Pass(values, inputs, ds)


def jacobian(layers, x):
    """`dz / dtheta` of every example, shape (N, D, P)."""
    _, inputs, ds = run(layers, x)
    blocks = [
        np.einsum("ni,nko->nkio", a, g).reshape(*g.shape[:2], -1)
        for a, g in zip(inputs, ds, strict=True)
    ]
    return np.concatenate(blocks, axis=-1)


# --- the loss ----------------------------------------------------------------------

# Averaged over the D outputs by Keras; the categorical ones are not.
AVERAGED = ("mse", "bce_logits", "bce", "poisson")


def share(kind, z):
    return 1.0 / z.shape[-1] if kind in AVERAGED else 1.0


def loss_values(kind, z, y):
    """The loss of every example, shape (N,)."""
    terms = {
        "mse": lambda: (z - y) ** 2,
        "bce_logits": lambda: np.logaddexp(0.0, z) - y * z,
        "bce": lambda: -y * np.log(z) - (1 - y) * np.log1p(-z),
        "ce_logits": lambda: -y * (z - np.log(np.exp(z).sum(-1, keepdims=True))),
        "ce": lambda: -y * np.log(z / z.sum(-1, keepdims=True)),
        "poisson": lambda: z - y * np.log(z),
    }[kind]()
    return terms.sum(-1) * share(kind, z)


def loss_gradient(kind, z, y):
    """`dloss / dz`, shape (N, D)."""
    return (
        share(kind, z)
        * {
            "mse": lambda: 2.0 * (z - y),
            "bce_logits": lambda: sigmoid(z) - y,
            "bce": lambda: (z - y) / (z * (1.0 - z)),
            "ce_logits": lambda: softmax(z) - y,
            "ce": lambda: y.sum(-1, keepdims=True) / z.sum(-1, keepdims=True) - y / z,
            "poisson": lambda: 1.0 - y / z,
        }[kind]()
    )


def output_fisher(kind, z):
    """The Fisher matrix with respect to the outputs, shape (N, D, D).

    In the natural parameters (squared loss, logits) it is the Hessian of the loss.
    """
    if kind == "ce_logits":
        return activation_jacobian("softmax", z)
    if kind == "ce":  # the logits are log z
        s = z.sum(-1)[:, None, None]
        return np.eye(z.shape[-1]) / (s * z[:, :, None]) - 1.0 / s**2
    diagonal = {
        "mse": lambda: np.full_like(z, 2.0),
        "bce_logits": lambda: sigmoid(z) * sigmoid(-z),
        "bce": lambda: 1.0 / (z * (1.0 - z)),
        "poisson": lambda: 1.0 / z,
    }[kind]()
    return share(kind, z) * diagonal[:, :, None] * np.eye(z.shape[-1])


def objective(layers, kind, x, y, w):
    z = run(layers, x).z
    penalty = sum(0.5 * np.sum(layer.eta * layer.W**2) for layer in layers)
    return w @ loss_values(kind, z, y) + penalty


def gradient(layers, kind, x, y, w):
    """`dh / dtheta`, shape (P,)."""
    J = jacobian(layers, x)
    data = np.einsum("n,nk,nkp->p", w, loss_gradient(kind, run(layers, x).z, y), J)
    return data + np.concatenate([(q.eta * q.W).ravel() for q in layers])


def fisher(layers, kind, x, w):
    """`sum_n w_n J^T F_R J`, shape (P, P), without the penalty."""
    J = jacobian(layers, x)
    return np.einsum(
        "n,nkp,nkl,nlq->pq", w, J, output_fisher(kind, run(layers, x).z), J
    )


# --- the factors -------------------------------------------------------------------


def factors(layers, kind, x, w):
    """`[(A, G), ...]` of one batch with the exact Fisher matrix.

    `A` is the mean over the examples by their weight, `G` the weighted sum, so that
    `A (x) G` is the curvature of the objective, whatever the reduction.
    """
    z, inputs, ds = run(layers, x)
    F = output_fisher(kind, z)
    return [
        (
            np.einsum("n,ni,nj->ij", w / w.sum(), a, a),
            np.einsum("n,nki,nkl,nlj->ij", w, g, F, g),
        )
        for a, g in zip(inputs, ds, strict=True)
    ]


def empirical_gradient_factors(layers, kind, x, y, w):
    """`G` of every layer from the gradients at the labels.

    The gradient of one example is that of `-log p`, which the loss is a multiple of.
    """
    z, _, ds = run(layers, x)
    constant = 2.0 / z.shape[-1] if kind == "mse" else share(kind, z)
    score = loss_gradient(kind, z, y) / constant
    rows = [np.einsum("nk,nki->ni", score, g) for g in ds]
    return [np.einsum("n,ni,nj->ij", w * constant, g, g) for g in rows]


def trace_norm_pi(A, G):
    return np.sqrt((np.trace(A) / len(A)) / (np.trace(G) / len(G)))


def damped_inverses(A, G, gamma):
    """Inverses of `A + pi gamma I` and `G + gamma / pi I`."""
    pi = trace_norm_pi(A, G)
    return (
        np.linalg.inv(A + pi * gamma * np.eye(len(A))),
        np.linalg.inv(G + gamma / pi * np.eye(len(G))),
    )


# --- the optimizer -----------------------------------------------------------------


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
    ):
        self.layers, self.kind = layers, kind
        self.damping, self.gamma = damping, np.sqrt(damping)
        self.learning_rate, self.momentum = learning_rate, momentum
        self.norm_constraint = norm_constraint
        self.damping_every, self.gamma_every = damping_every, gamma_every
        self.previous = np.zeros_like(flat(layers))
        self.average = None
        self.steps = 0

    def step(self, x, y, w):
        self.steps += 1
        layers, kind = self.layers, self.kind
        eta = np.concatenate([layer.eta.ravel() for layer in layers])
        grad = gradient(layers, kind, x, y, w)
        curvature = fisher(layers, kind, x, w) + np.diag(self.damping + eta)
        self._average(self._statistics(x, w))
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
            alpha, mu = self._coefficients(U, grad, curvature)
            direction = alpha * U + mu * self.previous
            tried.append((model(-direction), gamma, alpha, mu, direction))
        predicted, self.gamma, alpha, mu, direction = min(tried, key=lambda t: t[0])

        lr = 1.0 if self.learning_rate is None else self.learning_rate
        update = -lr * direction
        rho, damping = np.nan, self.damping
        measured = (np.nan, np.nan, np.nan)
        if self.damping_every and self.steps % self.damping_every == 0:
            after = moved(layers, update)
            change = objective(after, kind, x, y, w) - objective(layers, kind, x, y, w)
            rho = change / model(update)
            undamped = update @ curvature @ update - damping * update @ update
            measured = (model(update), change, undamped)
            omega = (19 / 20) ** self.damping_every
            if rho > 3 / 4:
                self.damping = omega * damping
            elif rho < 1 / 4:
                self.damping = damping / omega
        self.previous = direction
        self.layers = moved(layers, update)
        return Report(update, alpha * lr, mu, damping, self.gamma, rho, grad, *measured)

    def _statistics(self, x, w):
        return factors(self.layers, self.kind, x, w)

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

    def _precondition(self, grad, gamma):
        blocks = []
        for layer, (A, G), V in zip(
            self.layers, self.average, split(grad, self.layers), strict=True
        ):
            A_inverse, G_inverse = damped_inverses(
                A, G, np.sqrt(gamma**2 + 2.0 * layer.l2)
            )
            blocks.append((A_inverse @ V @ G_inverse).ravel())
        return np.concatenate(blocks)

    def _coefficients(self, U, grad, curvature):
        """`(alpha, mu)` of the direction `alpha U + mu previous`."""
        if self.learning_rate is not None:
            bound = np.inf if self.norm_constraint is None else self.norm_constraint
            nu = min(1.0, np.sqrt(bound / (self.learning_rate**2 * (grad @ U))))
            return nu, self.momentum
        if not self.previous.any():
            return (grad @ U) / (U @ curvature @ U), 0.0
        span = np.stack([U, self.previous], axis=1)  # delta = -span [alpha mu]
        return tuple(np.linalg.solve(span.T @ curvature @ span, span.T @ grad))
