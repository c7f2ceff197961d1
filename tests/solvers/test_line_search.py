import numpy as np
import pytest
from keras import ops

from keras_secondorder.solvers import Status, backtracking_line_search

# One float32 rounding in each of at most ten products: 1e-6.
SINGLE = 1e-6


def parabola(t):
    return (t - 1.0) ** 2  # f(0) = 1, slope -2; Armijo holds for t <= 2 (1 - c1)


@pytest.mark.parametrize(
    ("t0", "factor", "c1", "t", "evaluations"),
    [
        (1.0, 0.8, 1e-2, 1.0, 1),
        (4.0, 0.5, 1e-2, 1.0, 3),  # 4 and 2 are refused: f(2) = 1 is no decrease
        (10.0, 0.8, 1e-2, 10.0 * 0.8**8, 9),  # 2.1 refused, 1.68 accepted
        (1.0, 0.5, 0.6, 0.5, 2),  # c1 = 0.6 asks for t <= 0.8
    ],
)
def test_takes_the_first_step_that_decreases_enough(t0, factor, c1, t, evaluations):
    found = backtracking_line_search(parabola, 1.0, -2.0, t0=t0, factor=factor, c1=c1)
    np.testing.assert_allclose(float(found.t), t, rtol=SINGLE)
    np.testing.assert_allclose(float(found.value), (t - 1) ** 2, atol=SINGLE)
    assert found.evaluations == evaluations
    assert found.status == Status.SUFFICIENT_DECREASE


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_value_is_no_decrease(bad):
    def f(t):
        return ops.where(t > 0.3, ops.full_like(t, bad), -t)

    found = backtracking_line_search(f, 0.0, -1.0, factor=0.5)
    assert float(found.t) == 0.25 and float(found.value) == -0.25
    assert found.evaluations == 3
    assert found.status == Status.SUFFICIENT_DECREASE


def test_no_accepted_step_gives_zero():
    found = backtracking_line_search(lambda t: 5.0 + t, 5.0, -1.0, max_steps=7)
    assert float(found.t) == 0.0 and float(found.value) == 5.0
    assert found.evaluations == 7
    assert found.status == Status.NO_DECREASE


def test_step_limit_is_kept():
    # The fourth step, 0.5, is the first that would be accepted.
    arguments = dict(t0=4.0, factor=0.5, c1=0.7)
    refused = backtracking_line_search(parabola, 1.0, -2.0, max_steps=3, **arguments)
    assert refused.status == Status.NO_DECREASE and float(refused.t) == 0.0
    taken = backtracking_line_search(parabola, 1.0, -2.0, max_steps=4, **arguments)
    assert taken.status == Status.SUFFICIENT_DECREASE and float(taken.t) == 0.5


@pytest.mark.parametrize(
    ("f0", "slope", "status"),
    [
        (1.0, 0.0, Status.NOT_A_DESCENT_DIRECTION),
        (1.0, 2.0, Status.NOT_A_DESCENT_DIRECTION),
        (np.nan, -1.0, Status.NON_FINITE),
        (1.0, np.nan, Status.NON_FINITE),
        (np.inf, -1.0, Status.NON_FINITE),
    ],
)
def test_hopeless_start_evaluates_nothing(f0, slope, status):
    found = backtracking_line_search(parabola, f0, slope)
    assert found.status == status
    assert found.evaluations == 0 and float(found.t) == 0.0
    np.testing.assert_equal(float(found.value), f0)


def test_dtype_follows_f0(tensor, float64):
    found = backtracking_line_search(parabola, tensor(1.0), -2.0, t0=10.0)
    # 1e-15: float64 rounding; float32 would be off by 1e-8.
    np.testing.assert_allclose(float(found.t), 10.0 * 0.8**8, rtol=1e-15)
    assert ops.convert_to_numpy(found.value).dtype == np.float64


def test_compiled_equals_eager(tensor, compiled, assert_same):
    def search(f0, slope, t0):
        return backtracking_line_search(parabola, f0, slope, t0=t0)

    arguments = tensor(1.0), tensor(-2.0), tensor(10.0)
    eager = search(*arguments)
    assert eager.evaluations == 9
    assert_same(compiled(search)(*arguments), eager, atol=SINGLE)
