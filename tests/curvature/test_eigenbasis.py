"""Eigenbases of factors of every form, and what is computed along them."""

import numpy as np
import pytest
from keras import ops

from keras_secondorder.capture import Side
from keras_secondorder.curvature import second_moments
from keras_secondorder.curvature.eigenbasis import (
    coordinates,
    eigenbases,
    from_coordinates,
    moved,
)
from keras_secondorder.curvature.second_moments import (
    squared_gradients,
    squared_one_hot_gradients,
)

RNG = np.random.default_rng(0)
# Chains of a few float32 products of some dozen terms, next to the largest entry.
RTOL = 1e-5


def tensor(array):
    return ops.convert_to_tensor(np.asarray(array, "float32"))


def numpy(x):
    return ops.convert_to_numpy(x).astype(float)


def close(ours, right, rtol=RTOL):
    assert np.shape(ours) == np.shape(right)
    np.testing.assert_allclose(ours, right, rtol=0, atol=rtol * np.abs(right).max())


def spd(*shape, rank=None):
    root = RNG.normal(size=(*shape, rank or 2 * shape[-1]))
    return root @ root.swapaxes(-1, -2) / root.shape[-1]


# --- eigenbases ---------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
@pytest.mark.parametrize("shape", [(7,), (3, 4), (1,), (5, 1)], ids=str)
def test_eigenbasis_takes_a_factor_apart_at_any_scale(shape, scale):
    factor = scale * spd(*shape)
    if len(shape) == 1:
        factor = factor.reshape(shape[0], shape[0])
    ((values, basis),) = eigenbases([tensor(factor)])
    values, basis = numpy(values), numpy(basis)
    assert values.shape == factor.shape[:-1]
    close(basis * values[..., None, :] @ basis.swapaxes(-1, -2), factor)
    identity = np.broadcast_to(np.eye(shape[-1]), factor.shape)
    close(basis.swapaxes(-1, -2) @ basis, identity)


def test_a_singular_factor_has_no_negative_eigenvalue_r1():
    (values, basis), (zero, plain) = eigenbases(
        [tensor(spd(9, rank=3)), tensor(np.zeros((4, 4)))]
    )
    values = numpy(values)
    assert (values >= 0).all() and (values[:6] < 1e-6 * values.max()).all()
    close(numpy(basis).T @ numpy(basis), np.eye(9))
    np.testing.assert_array_equal(numpy(zero), np.zeros(4))
    close(numpy(plain).T @ numpy(plain), np.eye(4))


def test_dead_inputs_have_eigenvectors_to_themselves_r1():
    """R1: to the last bit, though a zero eigenvalue has many other eigenvectors."""
    dead = [0, 3, 8]
    factor = spd(9, rank=3)
    factor[dead], factor[:, dead] = 0.0, 0.0
    ((values, basis),) = eigenbases([tensor(factor)])
    values, basis = numpy(values), numpy(basis)
    alone = np.isclose(np.abs(basis[dead]).sum(0), 0.0, atol=0.0)
    assert alone.sum() == 6  # as many are of the other inputs only
    np.testing.assert_array_equal(basis[np.ix_([1, 2, 4, 5, 6, 7], ~alone)], 0.0)
    np.testing.assert_array_equal(values[~alone], 0.0)
    close(basis.T @ basis, np.eye(9))
    close(basis * values @ basis.T, factor)


def test_a_factor_that_is_not_finite_has_no_eigenbasis():
    factor = spd(4)
    factor[1, 2] = factor[2, 1] = np.nan
    (bad, good) = eigenbases([tensor(factor), tensor(spd(3))])
    assert not np.isfinite(numpy(bad[1])).any()
    assert np.isfinite(numpy(good[1])).all()


# --- coordinates --------------------------------------------------------------------

SIDES = {
    "full": (Side(1, 5), Side(1, 3)),
    "stack": (Side(2, 5), Side(2, 3)),
    "split": (Side(1, 5, 2), Side(1, 7, 3)),  # both have a padded last block
    "split stack": (Side(3, 4, 2), Side(3, 5, 2)),
    "diagonal": (Side(1, 6, 6), Side(1, 4)),
}


def padded(side):
    return side.blocks * side.width


def random_basis(side):
    """Orthogonal blocks that leave the padding alone, as an array of `side.shape`."""
    blocks = np.zeros((side.stack * side.blocks, side.width, side.width))
    for i in range(len(blocks)):
        last = i % side.blocks == side.blocks - 1
        size = side.size - (side.blocks - 1) * side.width if last else side.width
        q = np.linalg.qr(RNG.normal(size=(size, size)))[0]
        blocks[i] = np.eye(side.width)
        blocks[i, :size, :size] = np.eye(1) if side.width == 1 else q
    return blocks.reshape(side.shape)


def dense(basis, side):
    """`(stack, padded, padded)`, block-diagonal."""
    blocks = basis.reshape(side.stack, side.blocks, side.width, side.width)
    result = np.zeros((side.stack, padded(side), padded(side)))
    for j in range(side.blocks):
        at = slice(j * side.width, (j + 1) * side.width)
        result[:, at, at] = blocks[:, j]
    return result


class Problem:
    """Random bases, and rows of some examples, for two sides."""

    def __init__(self, name, examples=4, positions=3):
        self.sides = SIDES[name]
        self.arrays = [random_basis(s) for s in self.sides]
        self.bases = tuple(tensor(b) for b in self.arrays)
        self.dense = [dense(b, s) for b, s in zip(self.arrays, self.sides, strict=True)]
        self.stack = self.sides[0].stack
        shape = (self.stack, examples, positions)
        self.rows = [RNG.normal(size=(*shape, s.size)) for s in self.sides]

    def given(self, array):
        """Without the stack where it is 1."""
        return tensor(array if self.stack > 1 else array[0])

    def rotated(self, V):
        """`U_A^T V U_G` with the padding, for V of shape (..., stack, d_in, d_out)."""
        missing = [padded(s) - s.size for s in self.sides]
        V = np.pad(V, [(0, 0)] * (V.ndim - 2) + [(0, m) for m in missing])
        return self.dense[0].swapaxes(-1, -2) @ V @ self.dense[1]


@pytest.fixture(params=list(SIDES))
def problem(request):
    return Problem(request.param)


def test_coordinates_are_products_with_the_dense_basis(problem):
    V = RNG.normal(size=(problem.stack, *(s.size for s in problem.sides)))
    ours = coordinates(problem.given(V), problem.bases, problem.sides)
    right = problem.rotated(V)
    close(numpy(ours), right if problem.stack > 1 else right[0])
    back = from_coordinates(ours, problem.bases, problem.sides)
    close(numpy(back), V if problem.stack > 1 else V[0])


def test_moved_is_the_diagonal_of_the_same_matrix_in_the_new_basis(problem):
    a, g = (padded(s) for s in problem.sides)
    S = RNG.uniform(size=(problem.stack, a, g))
    new = [random_basis(s) for s in problem.sides]
    ours = moved(
        problem.given(S), problem.bases, [tensor(b) for b in new], problem.sides
    )
    after = [dense(b, s) for b, s in zip(new, problem.sides, strict=True)]
    for j in range(problem.stack):
        W = np.kron(problem.dense[0][j], problem.dense[1][j])
        F = W * S[j].ravel() @ W.T
        to = np.kron(after[0][j], after[1][j])
        right = np.diag(to.T @ F @ to).reshape(a, g)
        close(numpy(ours)[j] if problem.stack > 1 else numpy(ours), right)


@pytest.mark.parametrize("positions", [1, 2, 30])
@pytest.mark.parametrize("at_a_time", [10**6, 110])
def test_squared_gradients_are_those_of_single_examples(
    problem, positions, at_a_time, monkeypatch
):
    """Also a few examples at a time, of which the last are not as many."""
    monkeypatch.setattr(second_moments, "AT_A_TIME", at_a_time)
    problem = Problem(next(n for n, s in SIDES.items() if s == problem.sides),
                      5, positions)  # fmt: skip
    ours = squared_gradients(
        *map(problem.given, problem.rows), problem.bases, problem.sides
    )
    gradients = np.einsum("snti,sntj->nsij", *problem.rows)
    right = (problem.rotated(gradients) ** 2).sum(0)
    close(numpy(ours), right if problem.stack > 1 else right[0])


@pytest.mark.parametrize("at_a_time", [10**6, 50])
def test_squared_gradients_of_one_hot_rows(at_a_time, monkeypatch):
    """An entry that an example has at several positions has the sum of them."""
    monkeypatch.setattr(second_moments, "AT_A_TIME", at_a_time)
    problem = Problem("diagonal", 5, 4)
    indices = RNG.integers(0, 6, (5, 4))
    indices[0] = [2, 2, 2, 0]
    ours = squared_one_hot_gradients(
        ops.convert_to_tensor(indices.astype("int32")),
        tensor(problem.rows[1][0]),
        problem.bases,
        problem.sides,
    )
    gradients = np.einsum("nti,sntj->nsij", np.eye(6)[indices], problem.rows[1])
    close(numpy(ours), (problem.rotated(gradients) ** 2).sum((0, 1)))
