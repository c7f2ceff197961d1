"""K-FAC on dense matrices, in NumPy and float64, written without the package.

A network is a list of `Layer`. Parameters are one vector: the matrices
`W = [kernel; bias]` of shape (d_in [+ 1], d_out), each row by row, in order; for a
layer this is its kernel followed by its bias. `N` examples, `D` outputs, `P`
parameters. `w` are the weights of the examples in the objective:

    h(theta) = sum_n w_n loss(y_n, z_n) + sum_layers l2 |kernel|^2 + bias_l2 |bias|^2
"""

from typing import NamedTuple

import numpy as np


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


def uninformed(layers, kind, x, y, w):
    """The loss of the mean output for all rows."""
    z = run(layers, x).z
    return w @ loss_values(kind, np.tile(w @ z / w.sum(), (len(z), 1)), y)


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
