"""CenteredSGD and ACP against a dense transcription of their equations in NumPy."""

import keras
import numpy as np
import problems
import pytest
from keras import ops

import keras_secondorder as kso

# Float32 sums of two dozen rows, over steps that build on each other.
RTOL = 1e-4
DATA = problems.classification()
X, Y = 1.0 + DATA.x, DATA.one_hot
W = np.resize(np.float32([1.0, 0.0, 2.0]), len(X))


def network():
    model = problems.sequential([problems.dense(5, "tanh"), problems.dense(3)])
    problems.fill(model)
    return model


def dense_pass(params, w):
    """Inputs and loss gradients of both layers; the loss is `mean_n w_n mse_n`."""
    K1, b1, K2, b2 = params
    h = np.tanh(X @ K1 + b1)
    g2 = 2 / 3 * w[:, None] * (h @ K2 + b2 - Y) / len(X)
    return [(X, (g2 @ K2.T) * (1 - h**2)), (h, g2)]


def centered_steps(params, w, steps, rate, momentum):
    previous = [0.0] * 4
    for _ in range(steps):
        direction = []
        for a, g in dense_pass(params, w):
            mean = (w @ a) / w.sum()
            dK = (a - mean).T @ g
            direction += [dK, g.sum(0) - mean @ dK]
        previous = [momentum * p + d for p, d in zip(previous, direction, strict=True)]
        params = [p - rate * d for p, d in zip(params, previous, strict=True)]
    return params


def acp_steps(params, w, steps, rate, damping, fixed, decay, every, old_mean=False):
    kept = [None, None]
    count = 0
    for step in range(steps):
        due = step < 3 or step % every == 0
        count += due
        eps = min(1 - 1 / max(count, 1), decay)
        new = []
        for i, (a, g) in enumerate(dense_pass(params, w)):
            if due:
                share = w / w.sum()
                square = np.divide(
                    g**2, share[:, None], where=share[:, None] > 0, out=np.zeros_like(g)
                )
                batch = [share @ a, (a.T * share) @ a, fixed or square.sum(0).max()]
                old = kept[i] or batch
                kept[i] = [
                    eps * o + (1 - eps) * b for o, b in zip(old, batch, strict=True)
                ]
            mean, moment, alpha = kept[i]
            C = moment - np.outer(mean, mean)
            if not old_mean:
                mean = (w @ a) / w.sum()
            V = a.T @ g - np.outer(mean, g.sum(0))
            dK = np.linalg.solve(alpha * C + damping * np.eye(len(C)), V)
            new += [dK, g.sum(0) / (alpha + damping) - mean @ dK]
        params = [p - rate * d for p, d in zip(params, new, strict=True)]
    return params


def trained(optimizer, steps, weights):
    model = network()
    start = [ops.convert_to_numpy(v).astype(float) for v in model.weights]
    model.compile(optimizer=optimizer, loss="mse")
    for _ in range(steps):
        model.train_on_batch(X, Y, weights)
    return start, [ops.convert_to_numpy(v) for v in model.weights]


def assert_steps(ours, start, right):
    for o, s, r in zip(ours, start, right, strict=True):
        np.testing.assert_allclose(o - s, r - s, rtol=0, atol=RTOL * abs(r - s).max())


def test_centered_sgd_equals_its_equations():
    start, ours = trained(kso.CenteredSGD(0.1, momentum=0.5), 3, W)
    assert_steps(ours, start, centered_steps(start, W, 3, 0.1, 0.5))


@pytest.mark.parametrize("alpha", [None, 0.02])
def test_acp_equals_its_equations(alpha):
    optimizer = kso.ACP(
        0.1, 0.0, damping=0.01, alpha=alpha, refresh_every=4, statistics_decay=0.5
    )
    start, ours = trained(optimizer, 6, W)
    right = acp_steps(start, W, 6, 0.1, 0.01, alpha, 0.5, 4)
    assert_steps(ours, start, right)


def test_natural_network_keeps_the_mean():
    optimizer = kso.NaturalNetwork(0.02, 0.0, 0.1, refresh_every=4)
    start, ours = trained(optimizer, 6, W)
    right = acp_steps(start, W, 6, 0.02, 0.1, 1.0, 0.95, 4, old_mean=True)
    assert_steps(ours, start, right)
    other = acp_steps(start, W, 6, 0.02, 0.1, 1.0, 0.95, 4)
    with pytest.raises(AssertionError):
        assert_steps(ours, start, other)


def test_acp_is_kfac_with_a_multiple_of_the_identity():
    """`C (x) alpha I` in the centred coordinates is `A (x) alpha I` undamped."""
    rng = np.random.default_rng(0)
    A, g = rng.normal(size=(40, 5)), rng.normal(size=(40, 2))
    A[:, -1] = 1.0
    V = A.T @ g
    mean, K = A.mean(0), A[:, :-1] - A[:, :-1].mean(0)
    centred = kso.curvature.center(
        ops.convert_to_tensor(V, "float32"),
        ops.convert_to_tensor(mean, "float32"),
        True,
    )
    centred = ops.convert_to_numpy(centred)
    step = np.linalg.solve(K.T @ K / 40, centred[:-1])
    ours = kso.curvature.uncenter(
        ops.convert_to_tensor(np.r_[step, centred[-1:]], "float32"),
        ops.convert_to_tensor(mean, "float32"),
        True,
    )
    right = np.linalg.solve(A.T @ A / 40, V)
    np.testing.assert_allclose(ops.convert_to_numpy(ours), right, rtol=RTOL, atol=1e-3)


@pytest.mark.parametrize("make", [lambda: kso.CenteredSGD(0.05), kso.ACP])
def test_convolutions_normalisation_embedding_and_a_nan_batch(make):
    """Layers with groups, without a bias, or not affine; a bad batch; frozen rest."""
    keras.utils.set_random_seed(0)
    tokens, image = keras.Input((4,), dtype="int32"), keras.Input((6, 4))
    L = keras.layers
    h = L.Conv1D(4, 3, groups=2)(image)
    h = L.BatchNormalization()(L.Conv1D(4, 1, use_bias=False)(h))
    e = L.Embedding(7, 4)(tokens)
    outputs = L.Dense(1)(L.Flatten()(L.Add()([h, e])))
    model = keras.Model([tokens, image], outputs)
    model.compile(optimizer=make(), loss="mse")
    rng = np.random.default_rng(0)
    x = [rng.integers(0, 7, (32, 4)), rng.normal(1, 1, (32, 6, 4)).astype("float32")]
    y = x[1][:, 0, :1] * x[1][:, 1, :1]
    losses = []
    for _ in range(30):
        model.reset_metrics()
        losses.append(model.train_on_batch(x, y, return_dict=True)["loss"])
    assert losses[-1] < 0.5 * losses[0]
    before = [np.array(ops.convert_to_numpy(v)) for v in model.variables]
    bad = [x[0], np.where(np.arange(6)[:, None] == 1, np.nan, x[1]).astype("float32")]
    assert model.train_on_batch(bad, y, return_dict=True)["skipped_steps"] == 1
    for old, new in zip(before, model.variables, strict=True):
        np.testing.assert_array_equal(old, ops.convert_to_numpy(new))
