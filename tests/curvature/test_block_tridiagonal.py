"""The block-tridiagonal form against the explicit matrices of the thesis."""

import keras
import numpy as np
import oracle
import oracle_tridiagonal
import problems
import pytest
from keras import ops

from keras_secondorder.curvature import BlockTridiagonal
from keras_secondorder.curvature.kronecker_difference import (
    joint_roots,
    solve_difference,
)

RNG = np.random.default_rng(0)
GAMMA = 0.3
BATCH = problems.classification().batches()[0]
# float32 against float64, at condition numbers of about 100.
INVERSE_RTOL = 1e-5
X, W = BATCH.x.astype(float), BATCH.sample_weight.astype(float) / 8.0


def tensor(array):
    return ops.convert_to_tensor(np.asarray(array, "float32"))


def numpy(x):
    return ops.convert_to_numpy(x).astype(float)


# --- the inverse of a difference ---------------------------------------------------


def below(A, rank):
    """A matrix `C` with `0 <= C <= A`: what `rank` numbers explain of `A`."""
    L = np.linalg.cholesky(A)
    Q = np.linalg.qr(RNG.normal(size=A.shape))[0][:, :rank]
    return L @ (Q * RNG.uniform(0.5, 1.0, rank)) @ Q.T @ L.T


def test_difference_of_kronecker_products():
    """`(A (x) B - C (x) D)^-1`, A 5 x 5 and B 3 x 3, with C and D singular."""
    root_a, root_b = RNG.normal(size=(5, 9)), RNG.normal(size=(3, 6))
    A, B = root_a @ root_a.T, 1e-3 * root_b @ root_b.T
    C, D = below(A, 3), below(B, 2)
    dense = np.kron(A + 0.5 * np.eye(5), B + 2e-4 * np.eye(3)) - np.kron(C, D)
    V = RNG.normal(size=(5, 3))
    left, right = joint_roots(
        [tensor(A), tensor(B)], [tensor(0.5), tensor(2e-4)], [tensor(C), tensor(D)]
    )
    U = numpy(solve_difference(tensor(V), left, right))
    expected = np.linalg.solve(dense, V.ravel()).reshape(5, 3)
    np.testing.assert_allclose(
        U, expected, rtol=0, atol=INVERSE_RTOL * abs(expected).max()
    )


def test_roots_stay_within_bounds_where_rounding_would_take_them_out():
    """R3: hardly any damping, and everything explained: `1 - s_A s_B` above zero."""
    v = RNG.normal(size=(40, 3))
    A = tensor(v @ v.T)
    ((K, s),) = joint_roots([A], [tensor(0.0)], [1.001 * A])
    assert np.isfinite(numpy(K)).all()
    assert (numpy(s) >= 0).all() and (numpy(s) < 1).all()
    U = numpy(solve_difference(ops.ones((40, 40)), (K, s), (K, s)))
    assert np.isfinite(U).all()


def test_roots_are_nan_where_there_are_none():
    """The block keeps its old ones then."""
    nan = np.eye(3)
    nan[0, 1] = nan[1, 0] = np.nan
    good, bad = joint_roots(
        [tensor(np.eye(3)), tensor(nan)],
        [tensor(0.1)] * 2,
        [tensor(0.5 * np.eye(3))] * 2,
    )
    assert all(np.isfinite(numpy(part)).all() for part in good)
    assert all(np.isnan(numpy(part)).all() for part in bad)


# --- the inverse of a whole network ------------------------------------------------


def network():
    """6-4-3-5-3, one layer without a bias, one with an L2 penalty."""
    penalty = keras.regularizers.L2(0.02)
    return problems.sequential(
        [
            problems.dense(4, "tanh"),
            problems.dense(3, "sigmoid", kernel_regularizer=penalty),
            problems.dense(5, "tanh", use_bias=False),
            problems.dense(3),
        ]
    )


@pytest.fixture(scope="module")
def chain():
    """`(BlockTridiagonal, its moments)`, as the exact Fisher of one batch has them."""
    model = network()
    curvature = BlockTridiagonal(model, problems.add_variable)
    moments = oracle_tridiagonal.moments(
        problems.oracle_layers(model), "ce_logits", X, W
    )
    for block, new in zip(curvature.blocks, moments, strict=True):
        for variable, value in zip(block.factors, new, strict=True):
            variable.assign(tensor(value))
    return curvature, moments


ETAS = [0.0, 0.04, 0.0, 0.0]
STRENGTHS = [GAMMA**2 + eta for eta in ETAS]


def applied(curvature, inverses, vectors):
    """The rows of `F^-1` times each of some vectors `(count, P)`."""
    shapes = [v.shape for b in curvature.blocks for v in b.variables]
    ends = np.cumsum([0, *(int(np.prod(s)) for s in shapes)])
    rows = []
    for vector in vectors:
        V = [
            tensor(vector[a:b].reshape(s))
            for a, b, s in zip(ends, ends[1:], shapes, strict=False)
        ]
        U = curvature.precondition(V, inverses, tensor(0.0), {}, {})
        rows.append(np.concatenate([numpy(u).ravel() for u in U]))
    return np.stack(rows)


def test_inverse_equals_the_explicit_matrix(chain):
    curvature, moments = chain
    right = oracle_tridiagonal.inverse(oracle_tridiagonal.damped(moments, STRENGTHS))
    inverses = curvature.damped_inverses(tensor(GAMMA))
    assert int(inverses.failed) == 0
    vectors = np.vstack([np.eye(len(right))[::7], RNG.normal(size=(4, len(right)))])
    ours = applied(curvature, inverses, vectors)
    expected = vectors @ right
    np.testing.assert_allclose(
        ours, expected, rtol=0, atol=INVERSE_RTOL * abs(expected).max()
    )
    # Without the links it would be another matrix, a thousand tolerances away.
    apart = np.abs(expected - applied_by_blocks(moments, vectors)).max()
    assert apart > 1000 * INVERSE_RTOL * np.abs(expected).max()


def applied_by_blocks(moments, vectors):
    damped = oracle_tridiagonal.damped(moments, STRENGTHS)
    diagonal, _ = oracle_tridiagonal.blocks_of(damped)
    ends = np.cumsum([0, *(len(F) for F in diagonal)])
    parts = [
        vectors[:, a:b] @ np.linalg.inv(F)
        for a, b, F in zip(ends, ends[1:], diagonal, strict=False)
    ]
    return np.hstack(parts)


def test_explicit_inverse_has_the_tridiagonal_blocks_of_the_moments(chain):
    """The oracle itself: what `Xi^T Lambda Xi` is the inverse of, and its zeros."""
    _, moments = chain
    damped = oracle_tridiagonal.damped(moments, STRENGTHS)
    inverse = oracle_tridiagonal.inverse(damped)
    F = np.linalg.inv(inverse)
    diagonal, above = oracle_tridiagonal.blocks_of(damped)
    ends = np.cumsum([0, *(len(block) for block in diagonal)])
    place = [slice(a, b) for a, b in zip(ends, ends[1:], strict=False)]
    for i, block in enumerate(diagonal):
        np.testing.assert_allclose(F[place[i], place[i]], block, atol=1e-10)
        for j in range(i + 2, len(diagonal)):
            np.testing.assert_allclose(inverse[place[i], place[j]], 0.0, atol=1e-10)
    for i, block in enumerate(above):
        np.testing.assert_allclose(F[place[i], place[i + 1]], block, atol=1e-10)
    assert np.linalg.eigvalsh(F)[0] > 0


def test_two_linear_layers_give_the_fisher_matrix():
    """An exact case: squared loss and no activation, so that nothing is left out."""
    layers = [
        oracle.Layer(RNG.normal(size=(7, 4))),
        oracle.Layer(RNG.normal(size=(5, 2))),
    ]
    moments = oracle_tridiagonal.moments(layers, "mse", X, W)
    diagonal, (above,) = oracle_tridiagonal.blocks_of(moments)
    F = np.block([[diagonal[0], above], [above.T, diagonal[1]]])
    np.testing.assert_allclose(oracle.fisher(layers, "mse", X, W), F, atol=1e-12)
    damped = oracle_tridiagonal.damped(moments, [GAMMA**2] * 2)
    diagonal, (above,) = oracle_tridiagonal.blocks_of(damped)
    F = np.block([[diagonal[0], above], [above.T, diagonal[1]]])
    identity = oracle_tridiagonal.inverse(damped) @ F
    np.testing.assert_allclose(identity, np.eye(len(F)), atol=1e-10)


# --- failing inverses --------------------------------------------------------------


def test_a_block_without_a_new_inverse_keeps_the_old_one(chain):
    """And nothing else does; the product stays positive definite."""
    curvature, _ = chain
    curvature.keep_inverses(curvature.damped_inverses(tensor(GAMMA)))
    kept = curvature.cached_inverses()
    block = curvature.blocks[1]
    good = numpy(block.factors[1])
    block.factors[1].assign(tensor(np.full(good.shape, np.nan)))
    try:
        fresh = curvature.damped_inverses(tensor(3.0 * GAMMA))
    finally:
        block.factors[1].assign(tensor(good))
    assert int(fresh.failed) - int(kept.failed) == 1
    for i, (new, old) in enumerate(zip(fresh.values, kept.values, strict=True)):
        same = [
            np.array_equal(numpy(n), numpy(o)) for n, o in zip(new, old, strict=True)
        ]
        assert all(same) if i == 1 else not any(same)
    vectors = RNG.normal(size=(5, sum(v.size for v in flat_shapes(curvature))))
    products = applied(curvature, fresh, vectors)
    assert (np.sum(products * vectors, axis=1) > 0).all()


def flat_shapes(curvature):
    return [np.empty(v.shape) for b in curvature.blocks for v in b.variables]
