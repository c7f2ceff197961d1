import numpy as np
import pytest
from keras import ops

from keras_secondorder.solvers import Status, conjugate_gradient, describe

# float32 rounding (6e-8) through some tens of iterations at condition 30: 1e-4.
SINGLE = 1e-4
# The same in float64 (1e-16) at condition 30, against a QR-based oracle: 1e-9.
DOUBLE = 1e-9


def spd(n, condition, seed):
    rng = np.random.default_rng(seed)
    basis, _ = np.linalg.qr(rng.standard_normal((n, n)))
    B = basis * np.geomspace(1, condition, n) @ basis.T
    return (B + B.T) / 2, rng.standard_normal(n)


def q(B, b, x):
    return 0.5 * x @ B @ x - b @ x


def krylov_minimiser(B, b, j, x0=None, M_inverse=None):
    """Minimise q over x0 + K_j(M^-1 B, M^-1 (b - B x0)) by dense algebra."""
    n = len(b)
    x0 = np.zeros(n) if x0 is None else x0
    M_inverse = np.eye(n) if M_inverse is None else M_inverse
    v, basis = M_inverse @ (b - B @ x0), np.zeros((n, 0))
    for _ in range(j):
        for _ in range(2):
            v = v - basis @ (basis.T @ v)
        basis = np.column_stack([basis, v / np.linalg.norm(v)])
        v = M_inverse @ (B @ basis[:, -1])
    return x0 + basis @ np.linalg.solve(basis.T @ B @ basis, basis.T @ (b - B @ x0))


def value(x):
    return ops.convert_to_numpy(x)


def test_solves_the_system(product, tensor):
    B, b = spd(40, 30.0, seed=0)
    found = conjugate_gradient(product(B), tensor(b), epsilon=None, rtol=1e-6)
    np.testing.assert_allclose(value(found.x), np.linalg.solve(B, b), atol=SINGLE)
    assert found.status == Status.RESIDUAL
    assert found.residual_norm <= 1e-6 * np.linalg.norm(b)
    assert 5 < found.iterations <= 60


def test_dtype_follows_b(product, tensor, float64):
    B, b = spd(20, 30.0, seed=1)
    found = conjugate_gradient(product(B), tensor(b), epsilon=None, rtol=1e-12)
    assert value(found.x).dtype == value(found.residual_norm).dtype == np.float64
    np.testing.assert_allclose(value(found.x), np.linalg.solve(B, b), atol=DOUBLE)


def test_kept_iterates_are_the_krylov_minimisers(product, tensor, float64):
    B, b = spd(40, 30.0, seed=2)
    found = conjugate_gradient(product(B), tensor(b), epsilon=None, max_iterations=20)
    kept = found.iterates
    count = int(kept.count)
    # ceil(1.3^i) without repetition, and the last.
    numbers = [1, 2, 3, 4, 5, 7, 9, 11, 14, 18, 20]
    assert value(kept.number)[:count].tolist() == numbers
    for row, j in enumerate(numbers):
        x = krylov_minimiser(B, b, j)
        np.testing.assert_allclose(value(kept.x)[row], x, atol=DOUBLE)
        np.testing.assert_allclose(value(kept.q)[row], q(B, b, x), atol=DOUBLE)
    np.testing.assert_array_equal(value(kept.x)[count - 1], value(found.x))
    assert found.status == Status.MAX_ITERATIONS and found.iterations == 20


@pytest.mark.parametrize(
    ("max_iterations", "numbers"),
    [(14, [1, 2, 3, 4, 5, 7, 9, 11, 14]), (6, [1, 2, 3, 4, 5, 6]), (0, [0])],
)
def test_the_last_iterate_is_kept_once(product, tensor, max_iterations, numbers):
    B, b = spd(40, 30.0, seed=2)
    found = conjugate_gradient(
        product(B), tensor(b), epsilon=None, max_iterations=max_iterations
    )
    kept = found.iterates
    count = len(numbers)
    assert kept.count == count
    assert value(kept.number)[:count].tolist() == numbers
    assert (value(kept.number)[count:] == -1).all()
    assert np.isinf(value(kept.q)[count:]).all()
    np.testing.assert_array_equal(value(kept.x)[count - 1], value(found.x))


def test_start_and_preconditioner_enter_the_krylov_space(product, tensor, float64):
    B, b = spd(30, 30.0, seed=3)
    M, x0 = spd(30, 5.0, seed=4)
    M_inverse = np.linalg.inv(M)
    found = conjugate_gradient(
        product(B),
        tensor(b),
        tensor(x0),
        preconditioner=product(M_inverse),
        epsilon=None,
        max_iterations=5,
    )
    for row, j in enumerate([1, 2, 3, 4, 5]):
        x = krylov_minimiser(B, b, j, x0, M_inverse)
        np.testing.assert_allclose(value(found.iterates.x)[row], x, atol=DOUBLE)
    residual = np.linalg.norm(b - B @ value(found.x))
    np.testing.assert_allclose(value(found.residual_norm), residual, atol=DOUBLE)


@pytest.mark.parametrize(
    ("epsilon", "window_min", "window_fraction"),
    [(5e-4, 10, 0.1), (1e-2, 3, 0.1), (1e-5, 2, 0.5)],
)
def test_stops_when_progress_stalls(
    product, tensor, float64, epsilon, window_min, window_fraction
):
    B, b = spd(60, 30.0, seed=5)
    values = [q(B, b, krylov_minimiser(B, b, j)) for j in range(60)]

    def stalls(j):
        k = max(window_min, int(np.ceil(round(window_fraction * j, 9))))
        drop = values[j] - values[max(j - k, 0)]
        return j > k and values[j] < 0 and drop / values[j] < k * epsilon

    expected = next(j for j in range(60) if stalls(j))
    found = conjugate_gradient(
        product(B),
        tensor(b),
        epsilon=epsilon,
        window_min=window_min,
        window_fraction=window_fraction,
    )
    assert found.status == Status.PROGRESS
    assert found.iterations == expected
    assert window_min < expected < 40


def test_progress_is_not_judged_while_q_is_positive(product, tensor):
    B, b = spd(40, 30.0, seed=6)
    start = tensor(np.full(40, 100.0))  # q(x0) is about 1e6, far above zero
    first = conjugate_gradient(
        product(B), tensor(b), start, epsilon=1e6, window_min=1, max_iterations=40
    )
    # So large an epsilon stops at the first iterate it is allowed to judge.
    numbers, values = value(first.iterates.number), value(first.iterates.q)
    count = int(first.iterates.count)
    assert first.status == Status.PROGRESS and first.iterations > 2
    assert values[count - 1] < 0 and (values[1 : count - 1] > 0).all()
    assert numbers[count - 1] == first.iterations


def test_diagonal_preconditioner_saves_nine_tenths_of_the_iterations(tensor):
    diagonal = np.geomspace(1.0, 1e4, 40)
    a, b = tensor(diagonal), tensor(np.ones(40))
    rows = {}
    for name, preconditioner in [("plain", None), ("diagonal", lambda r: r / a)]:
        rows[name] = conjugate_gradient(
            lambda x: a * x,
            b,
            preconditioner=preconditioner,
            epsilon=None,
            rtol=1e-3,
            max_iterations=2000,
        )
        assert rows[name].status == Status.RESIDUAL
    assert 10 * rows["diagonal"].iterations <= rows["plain"].iterations
    # M = B exactly: one step is the solution.
    assert rows["diagonal"].iterations == 1
    np.testing.assert_allclose(value(rows["diagonal"].x), 1 / diagonal, rtol=SINGLE)


def test_indefinite_preconditioner_is_reported(product, tensor):
    B, b = spd(10, 10.0, seed=7)
    found = conjugate_gradient(product(B), tensor(b), preconditioner=lambda r: -r)
    assert found.status == Status.INDEFINITE_PRECONDITIONER
    assert found.iterations == 0
    np.testing.assert_array_equal(value(found.x), np.zeros(10))


def test_negative_curvature_returns_the_iterate_before(tensor):
    a, b = np.array([2.0, 1.0, -1.0]), np.array([1.0, 1.0, 0.8])
    found = conjugate_gradient(lambda x: tensor(a) * x, tensor(b))
    assert found.status == Status.NEGATIVE_CURVATURE
    assert found.iterations == 1
    steepest = (b @ b) / (b @ (a * b)) * b
    np.testing.assert_allclose(value(found.x), steepest, atol=SINGLE)
    residual = np.linalg.norm(b - a * steepest)
    np.testing.assert_allclose(value(found.residual_norm), residual, atol=SINGLE)


@pytest.mark.parametrize("curvature", [-1.0, 0.0])
def test_negative_curvature_at_once_returns_the_start(tensor, curvature):
    start = np.array([3.0, -4.0])
    found = conjugate_gradient(
        lambda x: curvature * x, tensor([1.0, 1.0]), tensor(start)
    )
    assert found.status == Status.NEGATIVE_CURVATURE
    assert found.iterations == 0
    np.testing.assert_array_equal(value(found.x), start)
    np.testing.assert_array_equal(value(found.iterates.x)[0], start)
    assert found.iterates.count == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_product_returns_the_iterate_before(product, tensor, bad):
    B, b = spd(10, 10.0, seed=8)
    multiply, right = product(B), tensor(b)

    def breaks_at_the_second(v):
        return ops.where(ops.all(v == right), multiply(v), ops.full_like(v, bad))

    found = conjugate_gradient(breaks_at_the_second, right)
    assert found.status == Status.NON_FINITE
    assert found.iterations == 1
    steepest = (b @ b) / (b @ B @ b) * b
    np.testing.assert_allclose(value(found.x), steepest, atol=SINGLE)


def test_non_finite_right_hand_side_takes_no_step(tensor):
    found = conjugate_gradient(lambda x: x, tensor([1.0, np.nan]))
    assert found.status == Status.NON_FINITE and found.iterations == 0
    np.testing.assert_array_equal(value(found.x), np.zeros(2))


def test_zero_right_hand_side_is_solved(tensor):
    found = conjugate_gradient(lambda x: x, tensor(np.zeros(3)))
    assert found.status == Status.RESIDUAL and found.iterations == 0
    np.testing.assert_array_equal(value(found.x), np.zeros(3))


def test_running_on_after_the_solution_is_not_negative_curvature(product, tensor):
    # p^T B p is a millionth of r^T r: it underflows while r^T r is still positive.
    B, b = spd(5, 10.0, seed=9)
    found = conjugate_gradient(product(1e-6 * B), tensor(b), epsilon=None)
    assert found.status == Status.RESIDUAL
    expected = np.linalg.solve(1e-6 * B, b)
    np.testing.assert_allclose(value(found.x), expected, rtol=SINGLE)


def solve_with_everything(product, tensor):
    """Return a solver with a start, a preconditioner and a progress test."""
    B, b = spd(30, 30.0, seed=10)
    M, x0 = spd(30, 5.0, seed=11)
    multiply, precondition = product(B), product(np.linalg.inv(M))

    def solve(b, x0, epsilon):
        return conjugate_gradient(
            multiply,
            b,
            x0,
            preconditioner=precondition,
            epsilon=epsilon,
            window_min=3,
            max_iterations=50,
        )

    return solve, (tensor(b), tensor(x0), tensor(5e-4))


def test_compiled_equals_eager(product, tensor, compiled, assert_same):
    # Stops early: rounding that differs by compiler grows with every iteration.
    solve, (b, x0, _) = solve_with_everything(product, tensor)
    arguments = b, x0, tensor(0.1)
    eager = solve(*arguments)
    assert eager.status == Status.PROGRESS and eager.iterations >= 4
    assert_same(compiled(solve)(*arguments), eager, atol=SINGLE)


def test_compiled_equals_eager_to_the_end(
    product, tensor, float64, compiled, assert_same
):
    solve, arguments = solve_with_everything(product, tensor)
    eager = solve(*arguments)
    assert eager.status == Status.PROGRESS and eager.iterations >= 10
    assert_same(compiled(solve)(*arguments), eager, atol=DOUBLE)


@pytest.mark.parametrize("b", [np.ones((2, 2), "float32"), np.ones(2, "float16")])
def test_wrong_right_hand_side_is_refused(b):
    with pytest.raises(ValueError, match="flat vector of float32 or float64"):
        conjugate_gradient(lambda x: x, b)


def test_wrong_backtrack_base_is_refused(tensor):
    with pytest.raises(ValueError, match="`backtrack_base` must be above 1"):
        conjugate_gradient(lambda x: x, tensor([1.0]), backtrack_base=1.0)


@pytest.mark.parametrize("status", list(Status))
def test_every_status_has_advice(status):
    text = describe(ops.full((), int(status), dtype="int32"))
    assert text.startswith(f"{status.name}: ")
    assert text.endswith(".") and len(text) > 40
