"""The squares of the gradients of single examples, against loops over the examples."""

import keras
import numpy as np
import problems
import pytest
from keras import layers

from keras_secondorder import autodiff
from keras_secondorder.capture import plan_blocks
from keras_secondorder.curvature.squared_gradients import (
    curvature_diagonal,
    dense_wrappers,
)

# Sums over a dozen examples in float32.
EXACT = 1e-5
# Draws of the random signs. The estimate of a square has a relative deviation of about
# sqrt(2), so its mean over this many has one of 7 percent, and the norm over all
# entries of a variable is less than three of that away.
REPEATS = 400
IN_EXPECTATION = 0.2
ROWS = 12


def array(tensor):
    return np.array(keras.ops.convert_to_numpy(tensor))


def setting(model, x, y, weight, wrappers=dense_wrappers):
    with autodiff.no_grad():
        objective = problems.objective_of(model, x, y, weight)
        objective.wrappers = wrappers(model)
        return objective, objective.linearize_network(taps=True)


def diagonal(objective, network, kind, counter=0):
    counter = keras.ops.convert_to_tensor(counter, "int32")
    with autodiff.no_grad():
        squares = curvature_diagonal(objective, network, kind, 3, counter)
    return [array(s) for s in squares]


def loop(model, x, y, weight, scale):
    """`sum_n w_n / N g_n^2 / scale`, `g_n` the gradient of example n's own loss."""
    total = [0.0] * len(model.trainable_variables)
    for n in range(len(x)):
        with autodiff.no_grad():
            objective = problems.objective_of(model, x[n : n + 1], y[n : n + 1])
            gradient = objective.gradient(objective.linearize())[0]
        squares = [array(g).astype(float) ** 2 for g in gradient]
        share = weight[n] / len(x) / scale
        total = [share * s + t for s, t in zip(squares, total, strict=True)]
    return total


def data(shape, outputs):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, *shape)).astype("float32")
    y = rng.normal(size=(ROWS, outputs)).astype("float32")
    weight = rng.uniform(0.5, 2.0, ROWS).astype("float32")
    weight[4] = 0.0
    return x, y, weight


def compiled(stack, shape):
    model = problems.sequential(stack, shape, scale=0.5)
    model.compile(optimizer="sgd", loss="mse")
    return model


def one_below(model, x):
    """Targets for which the loss's gradient at the one output is 2: that of J_n, twice.

    The second derivative is 2 as well, so the Gauss-Newton diagonal, the sum of
    `2 J_n^2`, is half that of the squared gradients.
    """
    return array(model(x)) - 1.0


def test_dense_layers_are_exact():
    x, y, weight = data((4,), 2)
    model = compiled([layers.Dense(3, "tanh"), layers.Dense(2, use_bias=False)], (4,))
    objective, network = setting(model, x, y, weight)
    # The gradient of -log p is that of the loss: the mean of two squares is one time.
    expected = loop(model, x, y, weight, scale=1.0)
    ours = diagonal(objective, network, "empirical")
    for a, e in zip(ours, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=0, atol=EXACT * e.max())
    # Exact means that the random signs do not matter.
    again = diagonal(objective, network, "empirical", counter=1)
    np.testing.assert_allclose(again[0], ours[0], rtol=EXACT)


def test_gauss_newton_diagonal_of_one_output_is_exact():
    x, _, weight = data((4,), 1)
    model = compiled([layers.Dense(3, "tanh"), layers.Dense(1)], (4,))
    y = one_below(model, x)
    objective, network = setting(model, x, y, weight)
    expected = loop(model, x, y, weight, scale=2.0)
    ours = diagonal(objective, network, "gauss_newton")
    for a, e in zip(ours, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=0, atol=EXACT * e.max())


def test_other_layers_may_be_watched():
    """As they are where a Kronecker preconditioner watches them."""
    x, y, weight = data((4,), 2)
    stack = [layers.BatchNormalization(), layers.Reshape((2, 2)), layers.LSTM(2)]
    model = compiled([*stack, layers.Dense(2)], (4,))

    def every_wrapper(model):
        return tuple(b.wrapper for b in plan_blocks(model) if b.wrapper is not None)

    settings = [
        setting(model, x, y, weight, w) for w in (dense_wrappers, every_wrapper)
    ]
    right, ours = (diagonal(*s, "gauss_newton") for s in settings)
    for a, e in zip(ours, right, strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=EXACT * e.max())


@pytest.mark.parametrize("kind", ["empirical", "gauss_newton"])
def test_convolutions_are_unbiased(kind):
    x, y, weight = data((4, 4, 2), 1)
    stack = [layers.Conv2D(2, 3), layers.Flatten(), layers.Dense(1)]
    model = compiled(stack, (4, 4, 2))
    if kind == "gauss_newton":
        y = one_below(model, x)
    objective, network = setting(model, x, y, weight)
    expected = loop(model, x, y, weight, scale=2.0)
    draws = [diagonal(objective, network, kind, i) for i in range(REPEATS)]
    mean = [np.mean(d, axis=0) for d in zip(*draws, strict=True)]
    for a, e in zip(mean, expected, strict=True):
        assert np.linalg.norm(a - e) <= IN_EXPECTATION * np.linalg.norm(e)
    # The dense layer at the end is exact in each draw, the convolution is not.
    atol = 10 * EXACT * expected[2].max()
    np.testing.assert_allclose(draws[0][2], expected[2], rtol=0, atol=atol)
    assert np.linalg.norm(draws[0][0] - draws[1][0]) > 0.1 * np.linalg.norm(expected[0])
    assert all((s >= 0).all() for s in draws[0])
