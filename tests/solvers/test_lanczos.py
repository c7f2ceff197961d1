import numpy as np
import pytest
from keras import ops

from keras_secondorder.solvers import Status, lanczos, ritz_pairs

# float32 rounding (6e-8) times ||A|| = 10, through 12 steps: 1e-5.
SINGLE = 1e-5
# float64 rounding (1e-16) times ||A|| = 10, through 25 steps: 1e-12.
DOUBLE = 1e-12


def symmetric(eigenvalues, seed):
    rng = np.random.default_rng(seed)
    n = len(eigenvalues)
    basis, _ = np.linalg.qr(rng.standard_normal((n, n)))
    A = basis * eigenvalues @ basis.T
    return (A + A.T) / 2, basis, rng.standard_normal(n)


def value(x):
    return ops.convert_to_numpy(x)


def dense(found):
    """Return T and Q of the rows in use."""
    k = int(found.count)
    alphas, betas = value(found.alphas)[:k], value(found.betas)[: k - 1]
    T = np.diag(alphas) + np.diag(betas, 1) + np.diag(betas, -1)
    return T, value(found.basis)[:k]


def test_basis_and_tridiagonal_are_a_projection(product, tensor):
    A, _, v0 = symmetric(np.linspace(-5, 10, 30), seed=0)
    found = lanczos(product(A), tensor(v0), 12)
    T, Q = dense(found)
    assert found.count == 12 and found.status == Status.MAX_ITERATIONS
    np.testing.assert_allclose(Q @ Q.T, np.eye(12), atol=SINGLE)
    np.testing.assert_allclose(Q @ A @ Q.T, T, atol=SINGLE)
    np.testing.assert_allclose(Q[0], v0 / np.linalg.norm(v0), atol=SINGLE)
    # A Q^T = Q^T T plus one residual column, as long as the last beta.
    rest = A @ Q.T - Q.T @ T
    np.testing.assert_allclose(rest[:, :-1], 0, atol=SINGLE)
    last_beta = value(found.betas)[-1]
    np.testing.assert_allclose(np.linalg.norm(rest[:, -1]), last_beta, atol=SINGLE)
    assert last_beta > 1.0


def test_stays_orthogonal_where_plain_lanczos_does_not(product, tensor):
    # An isolated eigenvalue converges at once and ruins the plain recurrence.
    eigenvalues = np.concatenate([np.linspace(0, 1, 99), [10.0]])
    A, _, v0 = symmetric(eigenvalues, seed=1)
    _, Q = dense(lanczos(product(A), tensor(v0), 60))
    np.testing.assert_allclose(Q @ Q.T, np.eye(60), atol=SINGLE)

    A32, Q_plain = A.astype("float32"), np.zeros((60, 100), "float32")
    q, q_old = (v0 / np.linalg.norm(v0)).astype("float32"), 0
    beta = 0
    for j in range(60):
        Q_plain[j] = q
        w = A32 @ q
        w = w - (q @ w) * q - beta * q_old
        beta = np.linalg.norm(w)
        q, q_old = w / beta, q
    assert np.abs(Q_plain @ Q_plain.T - np.eye(60)).max() > 0.1


def test_all_steps_give_all_eigenpairs(product, tensor, float64):
    eigenvalues = np.linspace(-5, 10, 25)
    A, basis, v0 = symmetric(eigenvalues, seed=2)
    pairs = ritz_pairs(lanczos(product(A), tensor(v0), 25))
    np.testing.assert_allclose(value(pairs.values), eigenvalues, atol=DOUBLE)
    overlaps = np.abs(np.sum(value(pairs.vectors) * basis.T, axis=1))
    np.testing.assert_allclose(overlaps, 1, atol=DOUBLE)
    weights = (basis.T @ v0) ** 2 / (v0 @ v0)
    np.testing.assert_allclose(value(pairs.weights), weights, atol=DOUBLE)


def test_ritz_pairs_are_those_of_the_projection(product, tensor, float64):
    A, _, v0 = symmetric(np.linspace(-5, 10, 30), seed=3)
    found = lanczos(product(A), tensor(v0), 8)
    pairs = ritz_pairs(found)
    _, Q = dense(found)
    values, vectors = value(pairs.values), value(pairs.vectors)
    np.testing.assert_allclose(values, np.linalg.eigvalsh(Q @ A @ Q.T), atol=DOUBLE)
    residuals = np.linalg.norm(A @ vectors.T - vectors.T * values, axis=0)
    np.testing.assert_allclose(value(pairs.residual_norms), residuals, atol=DOUBLE)
    assert residuals.max() > 0.1  # not converged: the figures mean something
    # Gauss quadrature is exact for polynomials up to degree 2 m - 1 = 15.
    unit, scaled, power = v0 / np.linalg.norm(v0), A / 10, np.eye(30)
    for degree in range(16):
        moment = value(pairs.weights) @ (values / 10) ** degree
        np.testing.assert_allclose(moment, unit @ power @ unit, atol=DOUBLE)
        power = power @ scaled


def test_breakdown_keeps_the_exact_eigenvalues(product, tensor):
    A, basis, v0 = symmetric(np.repeat([-2.0, 1.0, 4.0], 5), seed=4)
    found = lanczos(product(A), tensor(v0), 8)
    assert found.count == 3 and found.status == Status.INVARIANT_SUBSPACE
    pairs = ritz_pairs(found)
    for part in (*found[:3], *pairs[:4]):
        assert np.isfinite(value(part)).all()
        np.testing.assert_array_equal(value(part)[3:], 0)
    assert value(found.betas)[2] == 0
    np.testing.assert_allclose(value(pairs.values)[:3], [-2, 1, 4], atol=SINGLE)
    np.testing.assert_allclose(np.sum(value(pairs.weights)), 1, atol=SINGLE)
    vectors = value(pairs.vectors)[:3]
    expected = vectors * [[-2], [1], [4]]
    np.testing.assert_allclose(vectors @ A, expected, atol=SINGLE)
    np.testing.assert_allclose(vectors @ vectors.T, np.eye(3), atol=SINGLE)


def test_breakdown_when_all_eigenvalues_are_negative_or_zero(tensor):
    # Unused entries must not be taken for eigenvalues, whatever the sign of A's.
    negative = ritz_pairs(lanczos(lambda v: -3.0 * v, tensor(np.ones(4)), 3))
    assert negative.count == 1
    np.testing.assert_allclose(value(negative.values), [-3, 0, 0], atol=SINGLE)
    zero = ritz_pairs(lanczos(lambda v: 0.0 * v, tensor(np.ones(4)), 3))
    assert zero.count == 1
    np.testing.assert_array_equal(value(zero.values), np.zeros(3))
    np.testing.assert_allclose(value(zero.vectors)[0], np.full(4, 0.5), atol=SINGLE)


def test_more_steps_than_dimensions(product, tensor):
    eigenvalues = np.array([-1.0, 0.5, 3.0, 10.0])
    A, _, v0 = symmetric(eigenvalues, seed=5)
    pairs = ritz_pairs(lanczos(product(A), tensor(v0), 9))
    assert pairs.count == 4
    np.testing.assert_allclose(value(pairs.values)[:4], eigenvalues, atol=SINGLE)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_a_scale_whose_squares_are_no_float32(product, tensor, scale):
    expected = np.arange(1.0, 6.0)
    A = np.diag(scale * expected)
    found = ritz_pairs(lanczos(product(A), tensor(np.ones(5)), 5))
    values = ops.convert_to_numpy(found.values) / scale
    np.testing.assert_allclose(values, expected, rtol=1e-4)


def test_one_step_is_the_rayleigh_quotient(product, tensor):
    A, _, v0 = symmetric(np.linspace(-5, 10, 30), seed=6)
    pairs = ritz_pairs(lanczos(product(A), tensor(v0), 1))
    np.testing.assert_allclose(
        value(pairs.values), [v0 @ A @ v0 / (v0 @ v0)], atol=SINGLE
    )
    np.testing.assert_allclose(
        value(pairs.vectors)[0], v0 / np.linalg.norm(v0), atol=SINGLE
    )


def test_non_finite_product_ends_before_that_step(product, tensor):
    A, _, v0 = symmetric(np.linspace(-5, 10, 30), seed=7)
    multiply, first = product(A), tensor(v0 / np.linalg.norm(v0))

    def breaks_at_the_second(v):
        near = ops.sum(v * first) > 0.5
        return ops.where(near, multiply(v), ops.full_like(v, np.nan))

    found = lanczos(breaks_at_the_second, tensor(v0), 5)
    assert found.status == Status.NON_FINITE and found.count == 1
    pairs = ritz_pairs(found)
    for part in (*found[:3], *pairs[:4]):
        assert np.isfinite(value(part)).all()
    unit = v0 / np.linalg.norm(v0)
    np.testing.assert_allclose(value(pairs.values)[0], unit @ A @ unit, atol=SINGLE)
    residual = np.linalg.norm(A @ unit - (unit @ A @ unit) * unit)
    np.testing.assert_allclose(value(pairs.residual_norms)[0], residual, atol=SINGLE)


@pytest.mark.parametrize(
    ("v0", "status"),
    [([0.0, 0.0], Status.INVARIANT_SUBSPACE), ([1.0, np.nan], Status.NON_FINITE)],
)
def test_unusable_start_gives_nothing(tensor, v0, status):
    found = lanczos(lambda v: v, tensor(v0), 3)
    assert found.status == status and found.count == 0
    for part in (*found[:3], *ritz_pairs(found)[:4]):
        np.testing.assert_array_equal(value(part), 0)


def test_no_steps_is_refused(tensor):
    with pytest.raises(ValueError, match="`m` must be at least 1"):
        lanczos(lambda v: v, tensor([1.0]), 0)


def test_compiled_equals_eager(product, tensor, compiled, assert_same):
    A, _, v0 = symmetric(np.linspace(-5, 10, 30), seed=8)
    multiply = product(A)
    eager = lanczos(multiply, tensor(v0), 6)
    found = compiled(lambda v: lanczos(multiply, v, 6))(tensor(v0))
    assert_same(found, eager, atol=SINGLE)

    pairs = compiled(lambda v: ritz_pairs(lanczos(multiply, v, 6)))(tensor(v0))
    expected = ritz_pairs(eager)
    # An eigenvector's sign is free.
    signs = np.sign(np.sum(value(pairs.vectors) * value(expected.vectors), axis=1))
    same_signs = ops.convert_to_tensor(value(pairs.vectors) * signs[:, None])
    assert_same(pairs._replace(vectors=same_signs), expected, atol=SINGLE)
