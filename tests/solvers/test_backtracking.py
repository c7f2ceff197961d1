import keras
import numpy as np
import pytest
from keras import ops

from keras_secondorder.solvers import backtrack, conjugate_gradient
from keras_secondorder.solvers.result import Iterates

# Sums of a few float32 products.
SINGLE = 1e-5


def kept(values, count=None):
    """Iterates whose first entry is the value of f there, and f."""
    values = np.asarray(values, "float32")
    count = len(values) if count is None else count
    x = np.stack([values, 10.0 + np.arange(len(values))], axis=1).astype("float32")
    return Iterates(
        x=ops.convert_to_tensor(x),
        number=ops.convert_to_tensor(3 * np.arange(len(values), dtype="int32") + 1),
        q=ops.zeros((len(values),)),
        count=ops.convert_to_tensor(count, dtype="int32"),
    )


def first_entry(x):
    return x[0]


NAN, INF = np.nan, np.inf


@pytest.mark.parametrize(
    ("values", "count", "row"),
    [
        ([4.0, 3.0, 2.0, 1.0], None, 3),  # the last is best
        ([1.0, 5.0, 3.0, 4.0], None, 2),  # not the best of all: 5 is in the way
        ([1.0, 2.0, 3.0, 4.0], None, 0),  # all the way back
        ([2.0, 2.0, 2.0], None, 2),  # equal is not better
        ([9.0, 1.0, 4.0, 0.0, 0.0], 3, 1),  # rows that are not in use do not count
        ([7.0], None, 0),
        ([2.0, NAN, 3.0, 4.0], None, 2),
        ([2.0, 3.0, NAN], None, 0),
        ([2.0, 3.0, INF], None, 0),
        ([1.0, NAN, NAN], None, 2),  # nothing is better than infinite just before
        ([1.0, -INF, 3.0], None, 2),
    ],
)
def test_goes_back_while_that_is_better(values, count, row):
    found = backtrack(first_entry, kept(values, count))
    assert int(found.row) == row
    assert int(found.number) == 3 * row + 1
    x = keras.ops.convert_to_numpy(found.x)
    np.testing.assert_array_equal(x, np.float32([values[row], 10.0 + row]))
    expected = values[row] if np.isfinite(values[row]) else INF
    assert float(found.value) == expected


def quadratic(product, tensor):
    """Conjugate gradients on a quadratic, with all that backtracking needs."""
    scales = np.array([1.0, 3.0, 10.0, 30.0, 100.0])
    b = np.array([1.0, -1.0, 2.0, 1.0, -3.0])
    solution = conjugate_gradient(
        product(np.diag(scales)), tensor(b), max_iterations=5, epsilon=None
    )
    return scales, b, solution


def test_on_the_quadratic_itself_the_last_iterate_is_best(product, tensor):
    scales, b, solution = quadratic(product, tensor)
    scales, b = tensor(scales), tensor(b)
    found = backtrack(
        lambda x: ops.sum(0.5 * scales * x * x - b * x), solution.iterates
    )
    assert int(found.row) == int(solution.iterates.count) - 1
    np.testing.assert_allclose(
        keras.ops.convert_to_numpy(found.x),
        keras.ops.convert_to_numpy(solution.x),
    )
    row = int(found.row)
    q = float(solution.iterates.q[row])
    np.testing.assert_allclose(float(found.value), q, rtol=SINGLE)


def test_another_quadratic_chooses_an_earlier_iterate(product, tensor):
    _, _, solution = quadratic(product, tensor)
    x = keras.ops.convert_to_numpy(solution.iterates.x)
    center = x[1]
    found = backtrack(lambda x: ops.sum((x - tensor(center)) ** 2), solution.iterates)
    assert int(found.row) == 1
    np.testing.assert_allclose(float(found.value), 0.0, atol=SINGLE)


def test_compiled_equals_eager(compiled, product, tensor, assert_same):
    _, _, solution = quadratic(product, tensor)
    center = solution.iterates.x[2]

    def run(iterates, center):
        return backtrack(lambda x: ops.sum((x - center) ** 2), iterates)

    eager = run(solution.iterates, center)
    assert int(eager.row) == 2
    assert_same(compiled(run)(solution.iterates, center), eager, atol=SINGLE)
