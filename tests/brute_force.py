"""Curvature matrices in NumPy and float64 from Jacobians that are built row by row.

Nothing here uses the objective or the likelihoods of the package: the network comes
from `stateless_call`, and what the loss does is written by hand in `oracle`. `w` are
the weights of the rows of an output, with the reduction and the loss weight in them.
"""

from typing import NamedTuple

import keras
import numpy as np
import oracle
from keras import ops

from keras_secondorder import autodiff


class Output(NamedTuple):
    """One output of a network, its positions as rows.

    Attributes:
        z: (rows, D)
        J: (rows, D, P)
        examples: (rows,), the example that each row belongs to
    """

    z: np.ndarray
    J: np.ndarray
    examples: np.ndarray


def array(tensor):
    return ops.convert_to_numpy(tensor).astype(float)


def flat(tensors):
    return np.concatenate([array(t).ravel() for t in tensors])


def outputs(model, x, training=False) -> list[Output]:
    """All outputs, with their Jacobians from one reverse pass for each entry."""
    x = keras.tree.map_structure(ops.convert_to_tensor, x)
    parameters = [v.value for v in model.trainable_variables]
    state = [v.value for v in model.non_trainable_variables]

    def network(primals, tap):
        y, _ = model.stateless_call(primals, state, x, training=training)
        return keras.tree.flatten(y), ()

    linear = autodiff.vjp(network, parameters, taps=False)
    pullback = autodiff.compiled(linear.pullback)
    result = []
    for i, tensor in enumerate(linear.outputs):
        z = array(tensor)
        rows = []
        for k in range(z.size):
            seeds = [np.zeros(o.shape, "float32") for o in linear.outputs]
            seeds[i].flat[k] = 1.0
            rows.append(flat(pullback([ops.convert_to_tensor(s) for s in seeds])))
        D = z.shape[-1]
        J = np.stack(rows).reshape(-1, D, len(rows[0]))
        examples = np.repeat(np.arange(len(z)), z.size // D // len(z))
        result.append(Output(z.reshape(-1, D), J, examples))
    return result


def loss_hessian(kind, z, y):
    """`d^2 loss / dz^2` or the Fisher matrix in its place, (rows, D, D)."""
    if kind == "huber":
        inside = (np.abs(z - y) <= 1.0) / z.shape[-1]
        return inside[:, :, None] * np.eye(z.shape[-1])
    return oracle.output_fisher(kind, z)


def gauss_newton(kind, out, y, w):
    """`sum over rows of  w J^T H_z J`."""
    return np.einsum("n,nkp,nkl,nlq->pq", w, out.J, loss_hessian(kind, out.z, y), out.J)


def example_gradients(kind, out, y, w):
    """`s_n = sum over the rows of n of  sqrt(w c) d(-log p)/dtheta`, (N, P).

    `c` is the loss over `-log p`.
    """
    c = 2.0 / out.z.shape[-1] if kind == "mse" else oracle.share(kind, out.z)
    score = oracle.loss_gradient(kind, out.z, y) / c
    rows = np.sqrt(w * c)[:, None] * np.einsum("nk,nkp->np", score, out.J)
    return np.stack([rows[out.examples == n].sum(0) for n in np.unique(out.examples)])


def differences(gradient, theta, step=1e-3):
    """The Jacobian of a gradient by differences of fourth order, (P, P)."""
    columns = []
    for e in step * np.eye(len(theta)):
        near = gradient(theta + e) - gradient(theta - e)
        far = gradient(theta + 2 * e) - gradient(theta - 2 * e)
        columns.append((8 * near - far) / (12 * step))
    return np.stack(columns, axis=1)
