"""Layers and losses that once broke a step on one of the backends."""

import warnings

import keras
import numpy as np
import pytest
from keras import layers

import keras_secondorder as kso

RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 4)).astype("float32")
Y = (2 * X[:, :1] + np.sin(X[:, 1:2])).astype("float32")


def embedding():
    ids = RNG.integers(0, 20, (64, 6))
    stack = [layers.Embedding(20, 8), layers.Flatten(), layers.Dense(1)]
    return keras.Sequential([keras.Input((6,), dtype="int32"), *stack]), ids


def attention():
    i = keras.Input((6, 8))
    h = layers.MultiHeadAttention(2, 4)(i, i)
    model = keras.Model(i, layers.Dense(1)(layers.Flatten()(h)))
    return model, RNG.normal(size=(64, 6, 8)).astype("float32")


def losses_of(model, x, y, loss, optimizer, batch_size=32, epochs=5):
    keras.utils.set_random_seed(0)
    model.compile(optimizer, loss)
    fit = model.fit(x, y, batch_size=batch_size, epochs=epochs, verbose=0)
    return fit.history


@pytest.mark.parametrize("build", [embedding, attention])
def test_default_trains_layers_without_a_wrapper(build):
    keras.utils.set_random_seed(0)
    model, x = build()
    history = losses_of(model, x, Y, "mse", kso.KFAC(), epochs=30)
    assert history["loss"][-1] < 0.6 * history["loss"][0]
    assert int(history["skipped_steps"][-1]) == 0


@pytest.mark.parametrize("batch_size", [32, 256])
def test_loss_that_returns_a_scalar(batch_size):
    def scalar(y, z):
        return keras.ops.mean(keras.ops.square(y - z))

    x, y = np.tile(X, (4, 1)), np.tile(Y, (4, 1))
    model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
    history = losses_of(model, x, y, scalar, kso.KFAC(), batch_size, epochs=20)
    assert history["loss"][-1] < 0.8 * history["loss"][0]


def test_empirical_fisher_takes_a_loss_that_is_not_convex():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3)])
    optimizer = kso.KFAC(fisher="empirical", damping=0.1)
    history = losses_of(model, X, X[:, :3], "cosine_similarity", optimizer)
    assert history["loss"][-1] < history["loss"][0] - 0.1


def soft(y):
    return np.abs(y) / np.abs(y).sum(-1, keepdims=True)


# Name: (loss, activation of the outputs, targets).
OTHER_LOSSES = {
    "huber": ("huber", None, X[:, :3]),
    "kl_divergence": ("kl_divergence", "softmax", soft(X[:, :3])),
    "focal": (
        keras.losses.CategoricalFocalCrossentropy(),
        "softmax",
        np.eye(3, dtype="float32")[np.argmax(X[:, :3], -1)],
    ),
    "a function, not convex": (
        lambda y, z: keras.ops.sum(keras.ops.log1p(keras.ops.square(y - z)), axis=-1),
        None,
        X[:, :3],
    ),
}


@pytest.mark.filterwarnings("ignore:The loss '.*' is not convex")
@pytest.mark.parametrize("name", list(OTHER_LOSSES))
def test_losses_that_are_no_distribution(name):
    loss, activation, y = OTHER_LOSSES[name]
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3, activation)])
    history = losses_of(model, X, y, loss, kso.KFAC())
    assert history["skipped_steps"][-1] == 0
    assert history["loss"][-1] < 0.9 * history["loss"][0]


@pytest.mark.parametrize("fisher", ["sampled", "exact", "empirical"])
def test_statistics_look_at_a_loss_whose_hessian_they_take(fisher):
    """A number as damping: nothing but the statistics needs the Hessian then."""

    def coupled(y, z):
        return (z - keras.ops.mean(z)) ** 2 + (z - y) ** 2

    model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
    model.compile(kso.KFAC(fisher=fisher, damping=0.1), coupled)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model.train_on_batch(X, Y)
    told = ["couples outputs of several examples" in str(w.message) for w in seen]
    assert any(told) == (fisher != "empirical")


def test_loss_that_reduces_by_itself_is_refused():
    class Own(keras.losses.Loss):
        def __call__(self, y_true, y_pred, sample_weight=None):
            return keras.ops.mean(keras.ops.square(y_true - y_pred))

    model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
    with pytest.raises(Exception, match="Override `call"):
        losses_of(model, X, Y, Own(), kso.KFAC())
