"""What a `LinearOperator` derives from its products, on matrices that are at hand."""

import numpy as np
import pytest
from keras import ops

from keras_secondorder.curvature import DenseOperator, LinearOperator
from keras_secondorder.testing import check_operator

# Sums of a dozen float32 products, compared with the largest entry.
RTOL = 1e-5
SHAPES = [(2, 3), (4,)]
P = 10


def symmetric(values, seed=0):
    """A matrix with known eigenvalues, and its eigenvectors as columns."""
    rng = np.random.default_rng(seed)
    Q, _ = np.linalg.qr(rng.normal(size=(len(values), len(values))))
    M = (Q * values) @ Q.T
    return ((M + M.T) / 2).astype("float32"), Q


EIGENVALUES = np.array([9.0, -7.0, 5.0, 3.0, 2.0, 1.0, 0.5, -0.3, 0.1, 0.0])
MATRIX, VECTORS = symmetric(EIGENVALUES)
A = DenseOperator(MATRIX, SHAPES)
POSITIVE = symmetric(np.arange(1.0, P + 1))[0]
V = np.random.default_rng(1).normal(size=(P, 3)).astype("float32")


def close(ours, right, rtol=RTOL):
    ours = ops.convert_to_numpy(ours) if ops.is_tensor(ours) else ours
    np.testing.assert_allclose(ours, right, rtol=0, atol=rtol * np.abs(right).max())


# --- the public suite --------------------------------------------------------------


def test_the_suite_accepts_a_good_operator():
    check_operator(A)
    check_operator(DenseOperator(POSITIVE), psd=True)


class Wrong(LinearOperator):
    """A matrix with one fault."""

    def __init__(self, fault):
        super().__init__(SHAPES, "float32")
        self._fault, self._calls = fault, 0

    def products(self, columns):
        self._calls += 1
        M = np.triu(MATRIX) if self._fault == "triangular" else MATRIX
        made = [ops.convert_to_numpy(v) @ M.T for v in columns]
        if self._fault == "affine":
            made = [m + np.full(P, 0.1, "float32") for m in made]
        if self._fault == "drifting":
            made = [m * (1 + 0.001 * self._calls) for m in made]
        if self._fault == "NaN":
            made = [m * np.float32("nan") for m in made]
        return [ops.convert_to_tensor(m.astype("float32")) for m in made]

    def diagonal(self, *args, **kwargs):
        d = super().diagonal(*args, **kwargs)
        return -d if self._fault == "diagonal" else d

    def trace(self, samples=64, method="hutch++", seed=0):
        t = super().trace(samples, method, seed)
        return 2.0 * t if self._fault == "trace" else t


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("triangular", "not symmetric"),
        ("affine", "not symmetric|flat vector"),
        ("drifting", "flat vector"),
        ("NaN", "not symmetric: off by nan"),
        ("diagonal", "diagonal"),
        ("trace", "trace"),
    ],
)
def test_the_suite_finds_a_fault(fault, message):
    with pytest.raises(AssertionError, match=message):
        check_operator(Wrong(fault))
    check_operator(Wrong(None))


def test_the_suite_finds_a_negative_eigenvalue():
    with pytest.raises(AssertionError, match="negative eigenvalue: off by 7"):
        check_operator(A, psd=True)


# --- arithmetic and forms of a vector ----------------------------------------------


def test_arithmetic():
    B = DenseOperator(POSITIVE, SHAPES)
    combined = 2.0 * A - B / 4.0 + np.float32(0.5) * (-B)
    right = 2.0 * MATRIX - 0.75 * POSITIVE
    close(combined.to_dense(), right)
    close(combined.damped(0.3).damped(0.2) @ V, right @ V + 0.5 * V)
    close((A * 3).diagonal(), 3 * np.diag(MATRIX))
    assert combined.shape == (P, P) and combined.shapes == SHAPES
    assert repr(A) == "<DenseOperator 10 x 10 float32>"


def test_float32_plus_float64():
    double = DenseOperator(np.eye(P))  # float64 where the backend has it
    close((A + double).to_dense(), MATRIX + np.eye(P))
    close((double + A).to_dense(), MATRIX + np.eye(P))


@pytest.mark.parametrize("dtype", ["int32", "float16", "bool"])
def test_a_matrix_of_another_dtype_is_float32(dtype):
    B = DenseOperator(np.diag([1, 0, 1]).astype(dtype))
    assert B.dtype == "float32"
    close(B @ np.array([0.5, 0.25, 0.125]), np.array([0.5, 0.0, 0.125]))


def test_a_result_has_the_form_of_its_vector():
    right = MATRIX @ V
    close(A @ V[:, 0], right[:, 0])
    close(A @ V, right)
    close(A @ V[:, :1], right[:, :1])
    cut = [V[:6].reshape(2, 3, 3), V[6:]]
    for given, expected in ((cut, right), ([c[..., 0] for c in cut], right[:, 0])):
        for nested in (given, tuple(given)):
            made = A @ nested
            assert [tuple(m.shape) for m in made] == [g.shape for g in given]
            close(made[0], expected[:6].reshape(given[0].shape))
            close(made[1], expected[6:])


# --- diagonal, trace, spectrum -----------------------------------------------------

SAMPLES = 1000


def test_exact_diagonal_and_trace():
    close(A.diagonal(), np.diag(MATRIX))
    close(A.diagonal(exact=True), np.diag(MATRIX))
    np.testing.assert_allclose(float(A.trace(None)), np.trace(MATRIX), rtol=RTOL)
    # No more products than an exact trace takes.
    np.testing.assert_allclose(float(A.trace(P)), np.trace(MATRIX), rtol=RTOL)


def test_estimated_diagonal():
    """Mean of 1,000; entry i has the variance sum_{j != i} A_ij^2."""
    error = np.sqrt((MATRIX**2).sum(1) - np.diag(MATRIX) ** 2) / np.sqrt(SAMPLES)
    ours = ops.convert_to_numpy(A.diagonal(samples=SAMPLES, seed=1))
    assert np.all(np.abs(ours - np.diag(MATRIX)) < 5 * error)
    assert np.abs(ours - np.diag(MATRIX)).max() > 1e-4  # an estimate


SMALL_TRACES = 100


@pytest.mark.parametrize("method", ["hutchinson", "hutch++"])
def test_estimated_trace(method):
    """Mean of 100 estimates from 6 products each."""
    draws = np.array(
        [float(A.trace(6, method=method, seed=s)) for s in range(SMALL_TRACES)]
    )
    error = draws.std() / np.sqrt(SMALL_TRACES)
    assert 0 < abs(draws.mean() - np.trace(MATRIX)) < 5 * error
    assert float(A.trace(6, method=method)) == float(A.trace(6, method=method, seed=0))


def test_trace_by_hutch_plus_plus_is_exact_where_the_sketch_spans_the_matrix():
    M = symmetric(np.array([5.0, -3.0] + [0.0] * 28))[0]
    ours = float(DenseOperator(M).trace(samples=9))
    np.testing.assert_allclose(ours, 2.0, rtol=0, atol=5 * RTOL)


def test_eigenpairs():
    found = A.eigenpairs(k=4, rtol=1e-4)
    close(found.values, EIGENVALUES[:4])
    close(A.eigenvalues(2), EIGENVALUES[:2])
    U = ops.convert_to_numpy(found.vectors)
    close(U @ U.T, np.eye(4))
    residual = U @ MATRIX - ops.convert_to_numpy(found.values)[:, None] * U
    assert np.all(np.linalg.norm(residual, axis=1) < 1e-4 * 9)
    assert found.products == P
    overlap = np.abs(np.sum(U * VECTORS[:, :4].T, axis=1))
    close(overlap, np.ones(4))


def test_eigenvalues_of_a_larger_matrix():
    """Lanczos goes on until it has them, and says so where it may not."""
    values = np.concatenate([[50.0, -40.0, 30.0], np.linspace(0, 1, 117)])
    B = DenseOperator(symmetric(values)[0])
    found = B.eigenpairs(k=3)
    close(found.values, values[:3])
    assert found.products < 120
    with pytest.warns(UserWarning, match="20 products found the 6 largest eigenvalues"):
        B.eigenvalues(k=6, max_products=20, rtol=1e-6)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    "values", [np.ones(5), np.zeros(4), [4, 4, 1], [5, -5, -5, 2, 0, 0, 0, 0]]
)
def test_eigenvalues_that_occur_more_than_once(values, seed):
    """One Lanczos start sees one vector of each eigenspace."""
    values = np.array(values, float)
    matrix = symmetric(values)[0]
    found = DenseOperator(matrix).eigenpairs(k=3, seed=seed)
    right = np.sort(np.abs(values))[::-1][:3]
    close(np.abs(ops.convert_to_numpy(found.values)), right)
    U = ops.convert_to_numpy(found.vectors)
    close(U @ U.T, np.eye(3))
    close(U @ matrix, ops.convert_to_numpy(found.values)[:, None] * U)


def test_spectral_density():
    density = A.spectral_density(samples=50, width=0.2)
    assert np.all(density.density >= 0)
    np.testing.assert_allclose(np.trapezoid(density.density, density.grid), 1.0)
    # Mean over 50 vectors of v . A v / v . v, whose variance is below 2 / P of A^2's
    # mean eigenvalue.
    mean = np.trapezoid(density.density * density.grid, density.grid)
    error = np.sqrt(2.0 / P * np.mean(EIGENVALUES**2) / 50)
    assert abs(mean - EIGENVALUES.mean()) < 5 * error
    # An eigenvalue that stands alone has its share of the mass around it.
    peak = np.abs(density.grid - 9.0) < 0.8
    mass = np.trapezoid(density.density[peak], density.grid[peak])
    assert 0.05 < mass < 0.15


# --- systems, SciPy ----------------------------------------------------------------


def test_a_solve_that_stops_short_says_so():
    with pytest.warns(UserWarning, match="after 2 iterations.*MAX_ITERATIONS: "):
        DenseOperator(POSITIVE, SHAPES).solve(V[:, 0], max_iterations=2)
    for method in ("cg", "minres_qlp"):
        with pytest.warns(UserWarning, match="Damping does not help"):
            BAD.solve(np.ones(BAD.shape[0], "float32"), method=method)


def test_solve():
    B, b = DenseOperator(POSITIVE, SHAPES), V[:, 0]
    right = np.linalg.solve(POSITIVE + 0.5 * np.eye(P), b)
    close(B.solve(b, damping=0.5).x, right, 10 * RTOL)  # condition number 10
    nested = B.solve([b[:6].reshape(2, 3), b[6:]], damping=0.5).x
    assert [tuple(part.shape) for part in nested] == SHAPES
    close(np.concatenate([np.ravel(n) for n in map(numpy, nested)]), right, 10 * RTOL)
    solution = A.solve(b, method="minres_qlp", damping=1.0, max_iterations=50)
    right = np.linalg.solve(MATRIX + np.eye(P), b)
    close(solution.x, right, 100 * RTOL)  # the condition number is 14; indefinite
    singular = A.solve(MATRIX @ b, method="minres_qlp", max_iterations=50)
    close(singular.x, np.linalg.pinv(MATRIX, rcond=1e-5) @ (MATRIX @ b), 1e-3)


def numpy(tensor):
    return ops.convert_to_numpy(tensor)


def test_as_scipy():
    from scipy.sparse.linalg import eigsh

    S = A.as_scipy()
    assert S.shape == (P, P) and S.dtype == np.float32
    close(S @ V, MATRIX @ V)
    close(S @ V[:, :1], MATRIX @ V[:, :1])
    close(S.T @ V[:, 0], MATRIX @ V[:, 0])
    close(eigsh(S, k=2, return_eigenvectors=False), np.array([-7.0, 9.0]))


# --- what is refused ---------------------------------------------------------------

BAD = DenseOperator(np.full((2, 2), np.nan))


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (lambda: A @ np.ones(9), ValueError, r"shape \(10,\).* \(9,\)"),
        (lambda: A @ np.ones((9, 2)), ValueError, r"\(10, k\).*\(9, 2\)"),
        (lambda: A @ [np.ones((2, 3))], ValueError, r"\[\(2, 3\), \(4,\)\]"),
        (lambda: A @ [np.ones((3, 2)), np.ones(4)], ValueError, "one more axis"),
        (lambda: A + DenseOperator(np.eye(2)), ValueError, r"\(10, 10\) and \(2, 2\)"),
        (lambda: A + 1.0, TypeError, r"Received 1.0.*damped\(lam\)"),
        (lambda: A * A, TypeError, "by a number. Received another operator"),
        (lambda: A @ A, TypeError, "by vectors. Received another operator"),
        (lambda: DenseOperator(np.ones((2, 3))), ValueError, r"square.*\(2, 3\)"),
        (lambda: A.trace(3, method="xtrace"), ValueError, "method='xtrace'"),
        (lambda: A.trace(-1), ValueError, "at least 1. Received samples=-1"),
        (lambda: A.diagonal(0), ValueError, "at least 1. Received samples=0"),
        (lambda: A.spectral_density(steps=0), ValueError, "at least 1.*steps=0"),
        (lambda: A.spectral_density(width=1e-6), ValueError, "between 512 points"),
        (lambda: BAD.eigenvalues(1), ValueError, "not finite. Received NaN"),
        (lambda: BAD.spectral_density(), ValueError, "not finite. Received NaN"),
        (lambda: A.eigenvalues(0), ValueError, "an integer of at least 1.*k=0"),
        (lambda: A.eigenvalues(2.5), ValueError, "an integer of at least 1.*k=2.5"),
        (lambda: A.damped(float("nan")), ValueError, "must be finite.*lam=nan"),
        (lambda: A.solve(V[:, 0], max_iterations=2.5), ValueError, "iterations=2.5"),
        (lambda: A.solve(V[:, 0], method="minres_qlp", max_iterations="a"), ValueError,
         "iterations='a'"),
        (lambda: A.solve(V[:, 0], x0=0.0), ValueError, r"`x0`.*\(\) and \(10,\)"),
        (lambda: A.eigenvalues(11), ValueError, "between 1 and 10.*k=11"),
        (lambda: A.solve(V[:, 0], method="lu"), ValueError, "minres_qlp.*method='lu'"),
        (lambda: A.solve(V), ValueError, "one vector. Received 3 columns"),
        (lambda: A.solve(V[:, :1]), ValueError, "one vector. Received 1 columns"),
        (lambda: LinearOperator([(20_001,)], "float32").to_dense(), ValueError,
         "20001 rows and take 2 GB"),
    ],
)  # fmt: skip
def test_refused(wrong, error, message):
    with pytest.raises(error, match=message):
        wrong()


def test_a_matrix_that_is_not_symmetric_is_refused():
    with pytest.raises(ValueError, match="differs from its transpose by 1"):
        DenseOperator([[1.0, 2.0], [1.0, 1.0]])


def test_cg_on_a_singular_matrix_says_what_became_of_it():
    G = np.random.default_rng(0).normal(size=(30, 10)).astype("float32")
    with pytest.warns(UserWarning, match="times that of x = 0.*method='minres_qlp'"):
        DenseOperator(G @ G.T).solve(np.ones(30, "float32"))
