import keras
import numpy as np
import oracle_steps
import pytest
from keras import ops

from keras_secondorder.solvers import Status, bfgs

# Float32: ten updates, each of which loses a few rounding errors of a condition of 100.
SINGLE = 1e-4
# Float64: the same with 1e-16, times the 1e3 of Rosenbrock's condition.
DOUBLE = 1e-9
SCALES = np.array([1.0, 4.0, 30.0])


def numpy_quadratic(x):
    return 0.5 * np.sum(SCALES * x * x), SCALES * x


def numpy_rosenbrock(x):
    a, b = x
    r = b - a * a
    return 100 * r * r + (1 - a) ** 2, np.array([-400 * a * r - 2 * (1 - a), 200 * r])


def quadratic(x):
    scales = ops.convert_to_tensor(SCALES, dtype=x.dtype)
    return 0.5 * ops.sum(scales * x * x), scales * x


def rosenbrock(x):
    a, b = x[0], x[1]
    r = b - a * a
    gradient = ops.stack([-400 * a * r - 2 * (1 - a), 200 * r])
    return 100 * r * r + (1 - a) ** 2, gradient


def array(tensor):
    return keras.ops.convert_to_numpy(tensor)


def test_exact_inverse_is_one_newton_step(tensor):
    found = bfgs(quadratic, tensor([1.0, -2.0, 3.0]), tensor(np.diag(1 / SCALES)))
    np.testing.assert_allclose(array(found.x), 0.0, atol=SINGLE)
    assert int(found.iterations) == 1 and int(found.evaluations) == 2
    assert int(found.status) == Status.RESIDUAL


@pytest.mark.parametrize("iterations", [1, 2, 5, 12])
@pytest.mark.parametrize("name", ["quadratic", "rosenbrock"])
def test_iterates_equal_the_product_form_in_numpy(name, iterations, tensor, float64):
    theirs = {"quadratic": numpy_quadratic, "rosenbrock": numpy_rosenbrock}[name]
    ours = {"quadratic": quadratic, "rosenbrock": rosenbrock}[name]
    x0 = {"quadratic": [1.0, -2.0, 0.5], "rosenbrock": [-1.2, 1.0]}[name]
    H0 = np.diag([0.5, 0.1, 0.2][: len(x0)])
    expected = oracle_steps.bfgs(theirs, np.array(x0), H0, iterations)
    found = bfgs(ours, tensor(x0), tensor(H0), max_iterations=iterations)
    np.testing.assert_allclose(array(found.x), expected.x, rtol=DOUBLE, atol=DOUBLE)
    assert int(found.iterations) == expected.iterations
    assert int(found.evaluations) == expected.evaluations
    np.testing.assert_allclose(
        float(found.value), theirs(expected.x)[0], rtol=1e-6, atol=DOUBLE
    )


def test_rosenbrock_to_its_minimum(tensor, float64):
    found = bfgs(
        rosenbrock, tensor([-1.2, 1.0]), max_iterations=100, max_evaluations=300
    )
    # gtol is relative to the gradient of 233 at the start: 2e-3, over a curvature of 1.
    np.testing.assert_allclose(array(found.x), 1.0, atol=5e-3)
    assert int(found.status) == Status.RESIDUAL
    assert 10 < int(found.iterations) < 100
    assert array(found.x).dtype == np.float64


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_start_that_is_not_finite(bad, tensor):
    found = bfgs(lambda x: (ops.sum(x) * bad, x), tensor([1.0, 2.0]))
    assert int(found.status) == Status.NON_FINITE
    assert int(found.iterations) == 0 and int(found.evaluations) == 1
    np.testing.assert_array_equal(array(found.x), [1.0, 2.0])


@pytest.mark.parametrize("where", ["value", "gradient"])
def test_bad_points_on_the_way_are_stepped_short_of(where, tensor):
    """A quadratic from 4 to 1 with a wall of NaN at 0.5, past which p = -6 leads."""

    def walled(x):
        value, gradient = ops.sum((x - 1.0) ** 2), 2.0 * (x - 1.0)
        bad = ops.where(x[0] < 0.5, float("nan"), 0.0)
        if where == "value":
            return value + bad, gradient
        return value, gradient + bad

    found = bfgs(walled, tensor([4.0]))
    np.testing.assert_allclose(array(found.x), [1.0], atol=SINGLE)
    assert int(found.status) == Status.RESIDUAL
    assert int(found.evaluations) >= 3  # the start, the wall, and the first half


def test_direction_uphill_is_not_taken(tensor):
    start = tensor([1.0, -2.0, 3.0])
    found = bfgs(quadratic, start, tensor(-np.eye(3)))
    assert int(found.status) == Status.NO_DECREASE
    assert int(found.iterations) == 0
    np.testing.assert_array_equal(array(found.x), array(start))
    np.testing.assert_allclose(float(found.value), float(quadratic(start)[0]))


def test_wrong_gradient_ends_and_leaves_the_start(tensor):
    found = bfgs(lambda x: (ops.sum(x * x), -2.0 * x), tensor([1.0, 2.0]))
    assert int(found.status) == Status.NO_DECREASE
    np.testing.assert_array_equal(array(found.x), [1.0, 2.0])
    assert int(found.evaluations) < 25


def test_minimum_at_the_start(tensor):
    found = bfgs(quadratic, tensor([0.0, 0.0, 0.0]))
    assert int(found.status) == Status.RESIDUAL
    assert int(found.iterations) == 0 and int(found.evaluations) == 1


def test_updates_without_curvature_are_left_out(tensor):
    """On a slope every step is the first one, and the inverse stays the identity."""

    def slope(x):
        return -ops.sum(x), -ops.ones_like(x)

    found = bfgs(slope, tensor([0.0, 0.0]), max_iterations=7)
    np.testing.assert_allclose(array(found.x), [7.0, 7.0])
    assert int(found.status) == Status.MAX_ITERATIONS
    assert int(found.iterations) == 7 and int(found.evaluations) == 8


def test_evaluations_are_limited(tensor):
    found = bfgs(rosenbrock, tensor([-1.2, 1.0]), max_evaluations=9)
    assert int(found.evaluations) == 9
    assert int(found.status) == Status.MAX_ITERATIONS


def test_compiled_equals_eager(compiled, tensor, assert_same):
    x0, H0 = tensor([1.0, -2.0, 0.5]), tensor(np.diag([0.5, 0.1, 0.05]))

    def run(x0, H0):
        return bfgs(quadratic, x0, H0, max_iterations=4)

    eager = run(x0, H0)
    assert int(eager.iterations) == 4
    assert_same(compiled(run)(x0, H0), eager, atol=SINGLE)
