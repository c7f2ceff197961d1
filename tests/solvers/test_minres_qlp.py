import numpy as np
import pytest
from keras import ops

from keras_secondorder.solvers import Status, minres_qlp

# The accuracy asked for: float64 against lstsq, where dropping a zero of a singular
# inconsistent system costs about sqrt(1e-16) times the condition number.
LSTSQ = 1e-6
# Regular and consistent systems: float64 rounding times the condition number 100.
DOUBLE = 1e-12
# float32 rounding (6e-8) times the condition number 10, some tens of iterations.
SINGLE = 1e-4

ALWAYS_QLP, DEFAULT, LATE_QLP = 1.0, None, 1e30


def system(kind, n, condition, seed):
    """Return an indefinite symmetric A and b."""
    rng = np.random.default_rng(seed)
    basis, _ = np.linalg.qr(rng.standard_normal((n, n)))
    eigenvalues = np.geomspace(1, 1 / condition, n) * rng.choice([-1, 1], n)
    if kind != "regular":
        eigenvalues[rng.permutation(n)[: n // 5]] = 0
    A = basis * eigenvalues @ basis.T
    A = (A + A.T) / 2
    b = rng.standard_normal(n)
    return A, b if kind == "inconsistent" else A @ b


def shortest(A, b):
    """Return the minimum-length least-squares solution (rank by rcond 1e-10)."""
    return np.linalg.lstsq(A, b, rcond=1e-10)[0]


def error(x, expected):
    return np.linalg.norm(value(x) - expected) / np.linalg.norm(expected)


def value(x):
    return ops.convert_to_numpy(x)


@pytest.mark.parametrize(
    ("condition", "trancond"),
    [(10.0, DEFAULT), (100.0, ALWAYS_QLP), (100.0, LATE_QLP)],
)
@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [("regular", DOUBLE), ("consistent", DOUBLE), ("inconsistent", LSTSQ)],
)
def test_agrees_with_lstsq(
    product, tensor, float64, kind, tolerance, condition, trancond
):
    for seed, n in enumerate([5, 16]):
        A, b = system(kind, n, condition, seed)
        found = minres_qlp(product(A), tensor(b), trancond=trancond)
        expected = shortest(A, b)
        assert error(found.x, expected) < tolerance
        if kind == "inconsistent":
            zeros = (Status.LEAST_SQUARES, Status.ILL_CONDITIONED)
            assert int(found.status) in zeros
        else:
            assert found.status == Status.RESIDUAL
        # What it says of itself is true.
        residual = np.linalg.norm(b - A @ value(found.x))
        np.testing.assert_allclose(value(found.residual_norm), residual, atol=DOUBLE)
        length = np.linalg.norm(value(found.x))
        said = value(found.estimates.solution_norm)
        np.testing.assert_allclose(said, length, rtol=LSTSQ)
        # A rounding above 1, because the bound is attained.
        assert 0.5 < found.estimates.matrix_norm <= 1 + DOUBLE
        nonzero = np.abs(np.linalg.eigvalsh(A))
        true = 1 / nonzero[nonzero > 1e-10].min()
        # The smallest gamma is above the smallest eigenvalue, by less than 5 here.
        assert true / 5 < found.estimates.condition < true * 1.01


def test_the_shortest_solution_is_not_what_stopping_mu_early_gives(
    product, tensor, float64
):
    # The oracle discriminates: b's own null part is in the Krylov space, and a
    # least-squares solution that keeps it is far from the shortest.
    A, b = system("inconsistent", 20, 10.0, seed=1)
    expected = shortest(A, b)
    null_part = b - A @ expected
    assert np.linalg.norm(A @ null_part) < LSTSQ
    found = minres_qlp(product(A), tensor(b))
    assert abs(value(found.x) @ null_part) < LSTSQ * (null_part @ null_part)
    assert np.linalg.norm(null_part) > 1.0


@pytest.mark.parametrize("kind", ["regular", "consistent"])
def test_moving_from_minres_to_qlp_changes_nothing(product, tensor, float64, kind):
    A, b = system(kind, 16, 100.0, seed=3)
    reference = minres_qlp(product(A), tensor(b), trancond=ALWAYS_QLP)
    # The condition estimate passes these on the way, so the move is in mid-run.
    for trancond in (2.0, 10.0, 50.0):
        found = minres_qlp(product(A), tensor(b), trancond=trancond)
        assert found.iterations == reference.iterations
        assert error(found.x, value(reference.x)) < DOUBLE


@pytest.mark.parametrize("iterations", [1, 3, 7])
def test_every_iterate_has_the_least_residual(product, tensor, float64, iterations):
    A, b = system("regular", 30, 100.0, seed=4)
    v, basis = b, np.zeros((30, 0))
    for _ in range(iterations):
        for _ in range(2):
            v = v - basis @ (basis.T @ v)
        basis = np.column_stack([basis, v / np.linalg.norm(v)])
        v = A @ basis[:, -1]
    expected = basis @ np.linalg.lstsq(A @ basis, b, rcond=None)[0]
    for trancond in (ALWAYS_QLP, LATE_QLP):
        found = minres_qlp(
            product(A), tensor(b), max_iterations=iterations, trancond=trancond
        )
        assert found.status == Status.MAX_ITERATIONS
        assert found.iterations == iterations
        assert error(found.x, expected) < DOUBLE
        residual = np.linalg.norm(b - A @ expected)
        np.testing.assert_allclose(value(found.residual_norm), residual, rtol=DOUBLE)
        # ||A r|| is known one step late.
        if iterations > 1:
            before = minres_qlp(product(A), tensor(b), max_iterations=iterations - 1)
            gradient = np.linalg.norm(A @ (b - A @ value(before.x)))
            np.testing.assert_allclose(
                value(found.estimates.normal_residual_norm), gradient, rtol=DOUBLE
            )


@pytest.mark.parametrize("rtol", [1e-2, 1e-5])
def test_rtol_on_the_residual(product, tensor, float64, rtol):
    A, b = system("regular", 40, 10.0, seed=5)
    found = minres_qlp(product(A), tensor(b), rtol=rtol)
    assert found.status == Status.RESIDUAL
    norm_b, norm_x = np.linalg.norm(b), np.linalg.norm(value(found.x))
    assert found.residual_norm <= rtol * (norm_x + norm_b)  # ||A|| = 1
    exact = minres_qlp(product(A), tensor(b))
    assert found.iterations < exact.iterations - 5


def test_rtol_on_the_gradient(product, tensor, float64):
    A, b = system("inconsistent", 40, 10.0, seed=6)
    found = minres_qlp(product(A), tensor(b), rtol=1e-4)
    assert found.status == Status.LEAST_SQUARES
    residual = np.linalg.norm(b - A @ value(found.x))
    assert found.estimates.normal_residual_norm <= 1e-4 * residual * 1.0001
    exact = minres_qlp(product(A), tensor(b))
    assert found.iterations < exact.iterations
    # Truncating at 1e-4 costs at most that times the condition number squared.
    assert error(found.x, shortest(A, b)) < 1e-2


def test_a_long_null_component_earns_no_tolerance(product, tensor, float64):
    # ||A|| ||x|| grows without bound towards the null vector, and rtol times it would
    # soon exceed any residual.
    for seed in range(4):
        A, b = system("inconsistent", 40, 1e3, seed)
        found = minres_qlp(product(A), tensor(b), rtol=1e-9, acondlim=1e14)
        zeros = (Status.LEAST_SQUARES, Status.ILL_CONDITIONED)
        assert int(found.status) in zeros
        # 1e-16 of rounding, magnified by as much as acondlim; without the rule 1e8.
        assert error(found.x, shortest(A, b)) < 1e-2


def test_shift_makes_the_system_singular(product, tensor, float64):
    A, b = system("regular", 20, 10.0, seed=7)
    shift = np.linalg.eigvalsh(A)[3]
    found = minres_qlp(product(A), tensor(b), shift=shift)
    assert error(found.x, shortest(A - shift * np.eye(20), b)) < LSTSQ


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [("regular", DOUBLE), ("consistent", DOUBLE), ("inconsistent", LSTSQ)],
)
def test_preconditioner_measures_lengths_in_its_own_metric(
    product, tensor, float64, kind, tolerance
):
    A, b = system(kind, 20, 10.0, seed=8)
    rng = np.random.default_rng(9)
    basis, _ = np.linalg.qr(rng.standard_normal((20, 20)))
    M = basis * np.geomspace(0.2, 5, 20) @ basis.T
    half_inverse = basis * np.geomspace(0.2, 5, 20) ** -0.5 @ basis.T
    found = minres_qlp(
        product(A), tensor(b), preconditioner=product(half_inverse @ half_inverse)
    )
    y = shortest(half_inverse @ A @ half_inverse, half_inverse @ b)
    assert error(found.x, half_inverse @ y) < tolerance
    length = np.sqrt(value(found.x) @ M @ value(found.x))
    said = value(found.estimates.solution_norm)
    np.testing.assert_allclose(said, length, rtol=LSTSQ)


def test_preconditioner_saves_iterations(tensor):
    a, b = np.geomspace(1, 1e4, 60), np.ones(60)
    diagonal, right = tensor(a), tensor(b)
    plain = minres_qlp(lambda x: diagonal * x, right, rtol=1e-4)
    helped = minres_qlp(
        lambda x: diagonal * x, right, rtol=1e-4, preconditioner=lambda r: r / diagonal
    )
    assert helped.status == Status.RESIDUAL
    assert helped.iterations <= 2 and plain.iterations >= 20
    np.testing.assert_allclose(value(helped.x), b / a, rtol=SINGLE)


def test_indefinite_preconditioner_is_reported(product, tensor):
    A, b = system("regular", 10, 10.0, seed=10)
    signs = tensor(np.where(np.arange(10) < 1, -1e3, 1.0))
    found = minres_qlp(product(A), tensor(b), preconditioner=lambda r: signs * r)
    assert found.status == Status.INDEFINITE_PRECONDITIONER
    assert np.isfinite(value(found.x)).all()


def test_maxxnorm_bounds_the_solution(product, tensor, float64):
    A, b = system("regular", 30, 100.0, seed=11)
    full = np.linalg.norm(np.linalg.solve(A, b))
    found = minres_qlp(product(A), tensor(b), maxxnorm=0.5 * full)
    assert found.status == Status.SOLUTION_NORM
    assert 0.1 * full < np.linalg.norm(value(found.x)) <= 0.5 * full
    residual = np.linalg.norm(b - A @ value(found.x))
    np.testing.assert_allclose(value(found.residual_norm), residual, rtol=DOUBLE)
    tiny = minres_qlp(product(A), tensor(b), maxxnorm=1e-9)
    assert tiny.status == Status.SOLUTION_NORM
    np.testing.assert_allclose(value(tiny.x), 0, atol=1e-9)


def test_acondlim_drops_the_smallest_direction(tensor, float64):
    a, b = np.array([1.0, -1.0, 1e-6]), np.array([1.0, 2.0, 1e-3])
    diagonal, right = tensor(a), tensor(b)
    kept = minres_qlp(lambda x: diagonal * x, right)
    assert kept.status == Status.RESIDUAL
    # Condition 1e6: ten digits of the sixteen remain.
    np.testing.assert_allclose(value(kept.x), b / a, rtol=1e-9)
    dropped = minres_qlp(lambda x: diagonal * x, right, acondlim=1e4)
    assert int(dropped.status) in (Status.ILL_CONDITIONED, Status.LEAST_SQUARES)
    # 1e-5: the direction found is the small eigenvector to about 1e-6.
    np.testing.assert_allclose(value(dropped.x), [1.0, -2.0, 0.0], atol=1e-5)
    np.testing.assert_allclose(value(dropped.residual_norm), 1e-3, rtol=1e-2)


def test_eigenvector_takes_one_iteration(tensor):
    found = minres_qlp(lambda x: -4.0 * x, tensor([2.0, 6.0]))
    assert found.status == Status.RESIDUAL and found.iterations == 1
    np.testing.assert_allclose(value(found.x), [-0.5, -1.5], rtol=SINGLE)


def test_null_vector_and_zero_have_the_solution_zero(tensor):
    a = tensor([1.0, 0.0])
    null = minres_qlp(lambda x: a * x, tensor([0.0, 3.0]))
    assert null.status == Status.LEAST_SQUARES
    np.testing.assert_array_equal(value(null.x), np.zeros(2))
    np.testing.assert_allclose(value(null.residual_norm), 3.0, rtol=SINGLE)
    zero = minres_qlp(lambda x: a * x, tensor([0.0, 0.0]))
    assert zero.status == Status.RESIDUAL and zero.iterations == 0
    np.testing.assert_array_equal(value(zero.x), np.zeros(2))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_product_returns_the_iterate_before(product, tensor, float64, bad):
    A, b = system("regular", 10, 10.0, seed=12)
    multiply, unit = product(A), tensor(b / np.linalg.norm(b))

    def breaks_at_the_second(v):
        near = ops.sum(v * unit) > 0.5
        return ops.where(near, multiply(v), ops.full_like(v, bad))

    found = minres_qlp(breaks_at_the_second, tensor(b))
    assert found.status == Status.NON_FINITE and found.iterations == 1
    first = b * (b @ A @ b) / np.sum((A @ b) ** 2)
    assert error(found.x, first) < DOUBLE
    at_once = minres_qlp(lambda v: bad * v, tensor(b))
    assert at_once.status == Status.NON_FINITE and at_once.iterations == 0
    np.testing.assert_array_equal(value(at_once.x), np.zeros(10))


def test_single_precision(product, tensor):
    for kind, tolerance in [("regular", SINGLE), ("consistent", SINGLE)]:
        A, b = system(kind, 20, 10.0, seed=13)
        found = minres_qlp(product(A), tensor(b))
        assert value(found.x).dtype == np.float32
        assert error(found.x, shortest(A, b)) < tolerance
    A, b = system("inconsistent", 20, 10.0, seed=13)
    found = minres_qlp(product(A), tensor(b))
    # sqrt of float32 rounding times the condition number 10: 3e-3.
    assert error(found.x, shortest(A, b)) < 3e-3


@pytest.mark.parametrize("scales", [(1e-30, 1.0), (1e25, 1.0), (1.0, 1e-30)])
def test_scales_whose_squares_are_no_float32(product, tensor, scales):
    A, b = system("regular", 20, 10.0, seed=8)
    x = value(minres_qlp(product(scales[0] * A), tensor(scales[1] * b)).x)
    assert error(x / scales[1] * scales[0], np.linalg.solve(A, b)) < SINGLE


def test_compiled_equals_eager(product, tensor, compiled, assert_same):
    A, b = system("regular", 20, 10.0, seed=14)
    M_inverse = product(np.diag(np.linspace(0.5, 2, 20)))
    multiply = product(A)

    def solve(b, rtol, trancond):
        return minres_qlp(
            multiply,
            b,
            rtol=rtol,
            trancond=trancond,
            preconditioner=M_inverse,
            max_iterations=6,
        )

    # Both updates and the move run. It stops early, because rounding that differs by
    # compiler grows with every Lanczos vector.
    arguments = tensor(b), tensor(1e-6), tensor(2.0)
    eager = solve(*arguments)
    assert eager.status == Status.MAX_ITERATIONS
    assert eager.estimates.condition > 2
    assert_same(compiled(solve)(*arguments), eager, atol=SINGLE)


@pytest.mark.parametrize(
    ("kind", "tolerance"), [("consistent", DOUBLE), ("inconsistent", LSTSQ)]
)
def test_compiled_agrees_with_lstsq(
    product, tensor, float64, compiled, kind, tolerance
):
    A, b = system(kind, 20, 10.0, seed=14)
    multiply = product(A)
    found = compiled(lambda b: minres_qlp(multiply, b, trancond=2.0))(tensor(b))
    assert error(found.x, shortest(A, b)) < tolerance
