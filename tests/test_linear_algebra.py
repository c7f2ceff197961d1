"""Inverses and eigenvectors, eagerly and inside compiled functions."""

import keras
import numpy as np
import pytest
from keras import ops
from modes import MODES

from keras_secondorder import autodiff


def compiled_flags(mode):
    """What `compiled` may be: the host's LAPACK cannot run inside TensorFlow's XLA."""
    return mode == "xla"


def inverted(mode, matrix, damping=0.0, scale=1.0):
    def f(m, *numbers):
        numbers = [[n] for n in numbers]
        return autodiff.spd_inverses([m], *numbers, compiled=compiled_flags(mode))[0]

    given = [
        ops.convert_to_tensor(np.array(v, "float32")) for v in (matrix, damping, scale)
    ]
    result = MODES[mode](f)(*given)
    np.testing.assert_array_equal(ops.convert_to_numpy(given[0]), matrix)  # unharmed
    return ops.convert_to_numpy(result)


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("size", [1, 5, 40])
def test_spd_inverse(mode, size):
    root = np.random.default_rng(size).normal(size=(size, 2 * size))
    matrix = (root @ root.T / size + 0.1 * np.eye(size)).astype("float32")

    inverse = inverted(mode, matrix)
    right = np.linalg.inv(matrix.astype(float))
    # Condition numbers are below 60, so this is a few hundred rounding errors.
    np.testing.assert_allclose(inverse, right, rtol=0, atol=1e-4 * np.abs(right).max())
    np.testing.assert_allclose(inverse, inverse.T, rtol=0, atol=1e-6)


@pytest.mark.parametrize("mode", list(MODES))
def test_orthonormal_bases_of_nested_spans(mode):
    """The first columns span what the first columns did, up to their signs."""
    given = np.random.default_rng(0).normal(size=(2, 30, 4)) * [1e3, 1.0, 1e-2, 1.0]
    given[1, 7] = 0.0

    def f(*matrices):
        return autodiff.orthonormal(list(matrices), compiled=compiled_flags(mode))

    tensors = [ops.convert_to_tensor(m.astype("float32")) for m in given]
    for matrix, basis in zip(given, MODES[mode](f)(*tensors), strict=True):
        Q, _ = np.linalg.qr(matrix)
        cosines = np.abs(np.sum(Q * ops.convert_to_numpy(basis), axis=0))
        np.testing.assert_allclose(cosines, 1.0, atol=1e-5)
        identity = ops.convert_to_numpy(ops.matmul(ops.transpose(basis), basis))
        np.testing.assert_allclose(identity, np.eye(4), atol=1e-5)


@pytest.mark.parametrize("mode", list(MODES))
def test_spd_inverse_of_a_damped_stack(mode):
    """One of the three is not definite; its damping and scale are its own."""
    roots = np.random.default_rng(0).normal(size=(3, 4, 8))
    matrices = (roots @ roots.swapaxes(-1, -2)).astype("float32")
    matrices[1] -= 20.0 * np.eye(4, dtype="float32")
    damping = np.array([0.5, 0.1, 3.0], "float32")
    inverse = inverted(mode, matrices, damping, np.array([8.0, 1.0, 0.3], "float32"))
    right = np.linalg.inv(matrices + damping[:, None, None] * np.eye(4))
    for k in (0, 2):
        np.testing.assert_allclose(inverse[k], right[k], rtol=1e-4, atol=1e-5)
    assert np.isnan(inverse[1]).all()


@pytest.mark.parametrize("mode", list(MODES))
def test_spd_inverse_of_an_indefinite_matrix_is_nan(mode):
    """The step must go on: no exception, and nothing that looks like an inverse."""
    matrix = np.diag(np.array([1.0, -1.0, 2.0], "float32"))

    inverse = inverted(mode, matrix)
    assert np.isnan(inverse).all()


@pytest.mark.parametrize("mode", list(MODES))
def test_spd_inverse_of_a_matrix_with_nan_is_nan(mode):
    matrix = np.eye(4, dtype="float32")
    matrix[1, 2] = matrix[2, 1] = np.nan

    inverse = inverted(mode, matrix)
    assert np.isnan(inverse).any()


@pytest.mark.parametrize("mode", list(MODES))
def test_symmetric_eigh(mode):
    """A matrix with a cluster of zero eigenvalues, a stack, and one without any."""
    root = np.random.default_rng(0).normal(size=(40, 10))
    stack = np.random.default_rng(1).normal(size=(3, 5, 5))
    nan = np.eye(4)
    nan[1, 2] = nan[2, 1] = np.nan
    matrices = [root @ root.T / 10, stack + stack.swapaxes(-1, -2), nan]

    def f(*matrices):
        return autodiff.symmetric_eigh(list(matrices), compiled=compiled_flags(mode))

    given = [ops.convert_to_tensor(m.astype("float32")) for m in matrices]
    *pairs, failed = keras.tree.map_structure(
        ops.convert_to_numpy, MODES[mode](f)(*given)
    )
    for (values, basis), matrix in zip(pairs, matrices, strict=False):
        # Some dozen times float32's rounding of the largest eigenvalue.
        atol = 1e-5 * np.abs(values).max()
        right = np.linalg.eigvalsh(matrix)
        np.testing.assert_allclose(values, right, rtol=0, atol=atol)
        back = basis * values[..., None, :] @ basis.swapaxes(-1, -2)
        np.testing.assert_allclose(back, matrix, rtol=0, atol=atol)
        identity = np.broadcast_to(np.eye(matrix.shape[-1]), matrix.shape)
        square = basis.swapaxes(-1, -2) @ basis
        np.testing.assert_allclose(square, identity, rtol=0, atol=1e-5)
    assert all(np.isnan(array).all() for array in failed)
