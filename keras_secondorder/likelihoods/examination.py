"""Looking at a loss that has no distribution, before its curvature is used."""

import contextlib
import warnings

import numpy as np
from keras import ops

from keras_secondorder import autodiff
from keras_secondorder.likelihoods.output_hessian import (
    MAX_DENSE_OUTPUTS,
    OutputHessian,
)

# Rounding alone moves an eigenvalue of a float32 Hessian by about 1e-6 of the largest.
TOLERANCE = 1e-4
EXAMPLES = 16
# The curvatures that need only derivatives of the whole objective.
WITHOUT_OUTPUT_HESSIAN = (
    "Use KFAC(fisher='empirical', damping=0.1), HessianFree(curvature='hessian') or "
    "NaturalGradient(metric='covariance')"
)


def is_coupled(loss, targets: tuple, outputs: tuple, classes: bool) -> bool:
    """Look at the Hessian of a loss, and warn of what will be done without.

    It is formed at a few outputs and targets between 0 and 1, where losses on
    probabilities and losses on real numbers are both defined.

    Args:
        loss: A Keras loss.
        targets: Shape of the targets without the examples.
        outputs: Shape of the outputs without the examples, the last entry D.
        classes: Whether the targets are integers.

    Returns:
        Whether it is anything but one block of at most 64 rows for each position, or a
        diagonal.
    """
    name = getattr(getattr(loss, "fn", None), "__name__", loss.name)
    y, z = _probes(targets, outputs, classes)

    def product(v, y=y):
        probe = OutputHessian(loss, ops.convert_to_tensor(y))
        v = ops.convert_to_tensor(v.astype("float32"))
        Hv = probe.unprojected_product(ops.convert_to_tensor(z), v)
        return ops.convert_to_numpy(Hv)

    try:
        block = autodiff.eagerly(lambda: _blocks(product, z, y))
    except Exception as error:  # the user's own function may do anything
        warnings.warn(
            f"The loss '{name}' could not be looked at on {EXAMPLES} examples of its "
            f"own ({type(error).__name__}: {error}). The second moment of its "
            "gradients is used in place of the Gauss-Newton matrix.",
            stacklevel=3,
        )
        return True
    if block is None:
        warnings.warn(
            f"The loss '{name}' couples outputs of several examples or positions, or "
            f"more than {MAX_DENSE_OUTPUTS} of one: its Hessian has no small blocks. "
            "In place of the Gauss-Newton matrix the second moment of its gradients "
            "is used, the empirical Fisher matrix. HessianFree(curvature='hessian') "
            "and `curvature.hessian` do without it.",
            stacklevel=3,
        )
    elif block.size:
        _warn_of_curvature(name, block, outputs[-1])
    return block is None


def _probes(targets, outputs, classes) -> tuple:
    """Targets and outputs of a few examples; half of the outputs are not in (0, 1).

    The first and the second half have the same targets: a loss may compare them.
    """
    rng = np.random.default_rng(0)
    z_shape = (EXAMPLES, *outputs)
    z = rng.uniform(0.05, 0.95, z_shape).astype("float32")
    z[EXAMPLES // 2 :] = 3.0 * rng.normal(size=z[EXAMPLES // 2 :].shape)
    if len(targets) < len(outputs):  # no last axis
        y_shape = z_shape[: len(targets) + 1]
    else:
        y_shape = (*z_shape[:-1], targets[-1])
    width = outputs[-1]
    half, again = (EXAMPLES // 2, *y_shape[1:]), [2] + [1] * (len(y_shape) - 1)
    if classes:
        one_hot = len(targets) == len(outputs) and targets[-1] == width > 1
        drawn = rng.integers(0, max(width, 2), half[:-1] if one_hot else half)
        y = np.eye(width, dtype="int32")[drawn] if one_hot else drawn.astype("int32")
        return np.tile(y, again), z
    y = rng.uniform(0.05, 0.95, half).astype("float32")
    if len(y_shape) == len(z_shape) and y_shape[-1] > 1:
        y = y / y.sum(-1, keepdims=True)
    return np.tile(y, again), z


def _blocks(product, z, y) -> np.ndarray | None:
    """The blocks of the positions where the loss is defined; None without blocks."""
    width = z.shape[-1]
    # One position is moved: what happens at the others?
    v = np.zeros(z.shape)
    first = (0,) * (z.ndim - 1)
    v[first] = np.linspace(0.5, 1.0, width)
    for Hv in _products(product, v, y):
        own = np.abs(Hv[first]).max()
        Hv[first] = 0.0
        if np.abs(Hv[np.isfinite(Hv)]).max(initial=0.0) > TOLERANCE * own:
            return None
    probes = min(width, MAX_DENSE_OUTPUTS)
    columns = []
    for k in range(probes):
        v = np.zeros(z.shape)
        v[..., k] = 1.0
        columns.append(product(v))
    block = np.stack(columns, -1).reshape(-1, width, probes)
    block = block[np.isfinite(block).all((1, 2))]  # outside of the loss's domain
    if width > MAX_DENSE_OUTPUTS and block.size:
        off_diagonal = block * (1 - np.eye(width, probes))
        if np.abs(off_diagonal).max() > TOLERANCE * np.abs(block).max():
            return None
    return block


def _products(product, v, y):
    """`H v`, and again with targets far apart, as a loss that ranks wants them."""
    yield product(v)
    if y.dtype.kind == "f":
        numbers = np.arange(len(y), dtype=y.dtype)
        spread = y + 2.0 * numbers.reshape(-1, *[1] * (y.ndim - 1))
        with contextlib.suppress(Exception):  # no targets of the user's loss
            yield product(v, spread)


def _warn_of_curvature(name, block, width) -> None:
    if width > MAX_DENSE_OUTPUTS:
        values = np.einsum("nkk->nk", block[:, : block.shape[-1]])
    else:
        values = np.linalg.eigvalsh((block + block.swapaxes(-1, -2)) / 2)
    if not values.any():
        warnings.warn(
            f"The loss '{name}' is linear in the outputs of the model, in pieces: its "
            "Gauss-Newton and Fisher matrices are zero. Steps are then those of damped "
            "gradient descent. KFAC(fisher='empirical') takes the second moment of the "
            "gradients, which is not zero; Huber's loss has curvature near a minimum.",
            stacklevel=4,
        )
    if values.min() < -TOLERANCE * np.abs(values).max():
        warnings.warn(
            f"The loss '{name}' is not convex in the outputs of the model: its Hessian "
            f"there has the eigenvalue {values.min():.3g}. The nearest positive "
            "semi-definite matrix is used in its place, with the negative eigenvalues "
            f"set to zero. {WITHOUT_OUTPUT_HESSIAN} to do without it.",
            stacklevel=4,
        )
