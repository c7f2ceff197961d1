"""Layer-wise descent: the updated gradient against a dense transcription."""

import keras
import numpy as np
import oracle
import problems
import pytest

import keras_secondorder as kso
from keras_secondorder.testing import check_optimizer

# A thousand times float32's rounding: sums over a few rows and three layers.
RTOL = 1e-4
RATE, ROWS = 0.7, 12


def network():
    return problems.sequential(
        [problems.dense(5, "tanh"), problems.dense(4, "tanh"), problems.dense(3)],
        scale=0.5,
    )


def batch():
    data = problems.classification(ROWS, seed=3)
    return data.x, data.x[:, :3] ** 2, data.sample_weight


def updated_backpropagation(layers, x, y, w, rate):
    """Directions by layer, dense: tanh layers, a linear last one, mean squared error.

    With `R` the change to first order when the layers above have moved by `V`:

        R s_m = a_m V_m + (R a_m) W_m,           R a_{m+1} = tanh'(s_m) R s_m
        R g_L = H_z R s_L
        R g_m = tanh''(s_m) R s_m (g_{m+1} W_{m+1}^T)
                + tanh'(s_m) (R g_{m+1} W_{m+1}^T + g_{m+1} V_{m+1}^T)
    """
    W = [layer.W for layer in layers]
    last = len(W) - 1
    a, s = [], []
    value = np.asarray(x, float)
    for m, weight in enumerate(W):
        a.append(np.hstack([value, np.ones((len(value), 1))]))
        s.append(a[m] @ weight)
        value = np.tanh(s[m])
    weight_of_row = 2.0 * w[:, None] / s[last].shape[1]  # H_z is this times I
    g = [None] * len(W)
    g[last] = weight_of_row * (s[last] - y)
    behind = [None] * len(W)  # g_{m+1} W_{m+1}^T
    for m in reversed(range(last)):
        behind[m] = g[m + 1] @ W[m + 1][:-1].T
        g[m] = (1 - np.tanh(s[m]) ** 2) * behind[m]

    V = [np.zeros_like(weight) for weight in W]
    directions = [None] * len(W)
    for layer in reversed(range(len(W))):
        Ra = np.zeros_like(a[layer][:, :-1])
        Rs = [None] * len(W)
        for m in range(layer, len(W)):
            Rs[m] = a[m] @ V[m] + Ra @ W[m][:-1]  # V[layer] is still zero
            Ra = (1 - np.tanh(s[m]) ** 2) * Rs[m]
        Rg = weight_of_row * Rs[last]
        for m in reversed(range(layer, last)):
            t = np.tanh(s[m])
            Rbehind = Rg @ W[m + 1][:-1].T + g[m + 1] @ V[m + 1][:-1].T
            Rg = -2 * t * (1 - t**2) * Rs[m] * behind[m] + (1 - t**2) * Rbehind
        directions[layer] = a[layer].T @ (g[layer] + Rg)
        V[layer] = -rate * directions[layer]
    return np.concatenate([d.ravel() for d in directions])


def true_gradients(layers, x, y, w, rate):
    """Directions by layer, each from the gradient where the layers above are now."""
    sizes = np.cumsum([0, *(layer.W.size for layer in layers)])
    delta = np.zeros(sizes[-1])
    for start, end in reversed(list(zip(sizes[:-1], sizes[1:], strict=True))):
        gradient = oracle.gradient(oracle.moved(layers, delta), "mse", x, y, w)
        delta[start:end] = -rate * gradient[start:end]
    return -delta / rate


EXPECTED = {
    "plain": lambda layers, x, y, w, rate: oracle.gradient(layers, "mse", x, y, w),
    "updated": updated_backpropagation,
    "true": true_gradients,
}


def step(gradient, rate=RATE):
    """The direction of one step, and the expected one."""
    model, (x, y, weight) = network(), batch()
    layers = problems.oracle_layers(model)
    model.compile(optimizer=kso.LayerwiseDescent(rate, gradient), loss="mse")
    before = problems.parameters(model)
    model.train_on_batch(x, y, weight)
    w = weight.astype(float) / ROWS
    expected = EXPECTED[gradient](layers, x, y, w, rate)
    return (before - problems.parameters(model)) / rate, expected


@pytest.mark.parametrize("gradient", EXPECTED)
def test_steps_equal_the_oracle(gradient):
    found, expected = step(gradient)
    assert np.linalg.norm(found - expected) <= RTOL * np.linalg.norm(expected)


def test_the_three_directions_differ_where_they_should():
    """The last layer is the same in all; the others are not.

    At a small rate, that is: at `RATE`, the update misleads more than it helps.
    """
    plain, updated, true = (step(gradient, 0.05)[1] for gradient in EXPECTED)
    last = 5 * 3
    np.testing.assert_allclose(plain[-last:], updated[-last:])
    np.testing.assert_allclose(plain[-last:], true[-last:])
    assert np.linalg.norm(plain - true) > 0.02 * np.linalg.norm(true)
    assert np.linalg.norm(updated - true) < 0.5 * np.linalg.norm(plain - true)


def test_the_prediction_is_of_first_order():
    """Half the rate, a quarter of the error."""

    def error(rate):
        arguments = (problems.oracle_layers(network()), *batch()[:2], np.ones(ROWS))
        updated = updated_backpropagation(*arguments, rate)
        return np.linalg.norm(updated - true_gradients(*arguments, rate))

    assert 3.5 < error(1e-3) / error(5e-4) < 4.5


def test_it_keeps_the_contract():
    # Descent without momentum is slow in a valley.
    check_optimizer(lambda: kso.LayerwiseDescent(0.003), 100, 400)


def test_a_batch_that_is_not_finite_changes_nothing():
    model, (x, y, _) = network(), batch()
    model.compile(optimizer=kso.LayerwiseDescent(), loss="mse")
    before = problems.parameters(model)
    x[0, 0] = np.nan
    logs = model.train_on_batch(x, y, return_dict=True)
    assert int(logs["skipped_steps"]) == 1
    np.testing.assert_array_equal(problems.parameters(model), before)


def test_other_gradients_are_refused():
    with pytest.raises(ValueError, match="'plain', 'updated', 'true'"):
        kso.LayerwiseDescent(gradient="old")
    assert kso.LayerwiseDescent(gradient="true").get_config()["gradient"] == "true"
    assert isinstance(kso.LayerwiseDescent(), keras.optimizers.Optimizer)
