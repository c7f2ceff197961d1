"""Layers: means taken out, inputs whitened, functions unchanged."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_secondorder as kso
from keras_secondorder.callbacks import Rewhitening
from keras_secondorder.layers import (
    MeanOnlyBatchNormalization,
    WhitenedDense,
    rewhiten,
    whiten,
)

RNG = np.random.default_rng(0)
X = (RNG.normal(size=(64, 5)) @ RNG.normal(size=(5, 5)) + 3.0).astype("float32")
# What float32 sums leave of an unchanged function.
ATOL = 1e-5


def array(tensor):
    return ops.convert_to_numpy(tensor)


def network():
    keras.utils.set_random_seed(0)
    L = keras.layers
    inner = keras.Sequential([keras.Input((4,)), L.Dense(3, activation="tanh")])
    inputs = keras.Input((5,))
    h = L.Dense(4, activation="tanh", name="first")(inputs)
    outputs = L.Dense(2, use_bias=False)(L.Add()([inner(h), L.Dense(3)(h)]))
    return keras.Model(inputs, outputs)


def test_mean_only_batch_normalization():
    layer = MeanOnlyBatchNormalization(axis=1, momentum=0.75)
    x = RNG.normal(2.0, 1.0, (6, 3, 4)).astype("float32")
    mean = x.mean((0, 2))
    y = array(layer(x, training=True))
    np.testing.assert_allclose(y, x - mean[:, None], atol=ATOL)
    np.testing.assert_allclose(array(layer.moving_mean), mean / 4, rtol=1e-5)
    layer.beta.assign([1.0, 2.0, 3.0])
    right = x - mean[:, None] / 4 + np.float32([1, 2, 3])[:, None]
    np.testing.assert_allclose(array(layer(x)), right, atol=ATOL)
    again = MeanOnlyBatchNormalization.from_config(layer.get_config())
    assert again.get_config() == layer.get_config()
    whole = MeanOnlyBatchNormalization()(np.array([[1], [2]]), training=True)
    np.testing.assert_allclose(array(whole), [[-0.5], [0.5]])


def test_a_frozen_layer_is_in_inference_mode():
    layer = MeanOnlyBatchNormalization()
    x = RNG.normal(2.0, 1.0, (6, 3)).astype("float32")
    layer.build(x.shape)
    layer.trainable = False
    np.testing.assert_array_equal(array(layer(x, training=True)), x)
    np.testing.assert_array_equal(array(layer.moving_mean), 0.0)


def test_masked_positions_do_not_count_in_the_mean():
    x = RNG.normal(size=(4, 3, 2)).astype("float32")
    mask = RNG.integers(0, 2, (4, 3)).astype(bool)
    layer = MeanOnlyBatchNormalization(momentum=0.0)
    x = np.where(mask[..., None], x, np.nan)
    layer(x, training=True, mask=ops.convert_to_tensor(mask))
    np.testing.assert_allclose(array(layer.moving_mean), x[mask].mean(0), atol=ATOL)


def test_the_function_is_unchanged_at_each_refresh():
    plain = network()
    model = whiten(plain)
    right = array(plain(X))
    np.testing.assert_allclose(array(model(X)), right, atol=ATOL)
    for x in (X, 2.0 * X[:40] - 1.0, X[:3]):  # the last covariance is singular
        rewhiten(model, x, 0.01)
        np.testing.assert_allclose(array(model(X)), right, atol=10 * ATOL)
    kinds = [type(layer) for layer in model.layers]
    assert kinds.count(WhitenedDense) == 2  # without the one that has no bias


def test_the_input_of_the_kernel_is_white():
    model = whiten(network())
    rewhiten(model, X, 1e-6)
    layer = model.get_layer("first")
    h = (X - array(layer.mean)) @ array(layer.whitening)
    np.testing.assert_allclose(h.T @ h / len(h), np.eye(5), atol=1e-3)
    np.testing.assert_allclose(h.mean(0), 0.0, atol=1e-4)


def test_training_saving_and_the_callback(tmp_path):
    """Trained by SGD; the refresh in the middle of `fit` is of the present weights."""
    model = whiten(network())
    model.compile(optimizer=keras.optimizers.SGD(0.05), loss="mse")
    y = np.tanh(X[:, :2] - X[:, 1:3])
    outputs = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if keras.config.backend() == "jax":
                self.model.jax_state_sync()
            outputs.append(array(self.model(X)))

    callbacks = [Watch(), Rewhitening(X, every=3), Watch()]
    history = model.fit(X, y, batch_size=16, epochs=20, verbose=0, callbacks=callbacks)
    assert history.history["loss"][-1] < 0.5 * history.history["loss"][0]
    for before, after in zip(outputs[::2], outputs[1::2], strict=True):
        np.testing.assert_allclose(after, before, atol=10 * ATOL)
    assert np.abs(outputs[-1] - outputs[0]).max() > 0.1
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(array(again(X)), array(model(X)))


def test_a_whitened_network_under_sgd_takes_the_steps_of_natural_network():
    """`NaturalNetwork` on the plain model, for the layer's kernel; thesis, 6.5.2."""
    keras.utils.set_random_seed(0)
    plain = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2)])
    model = whiten(plain)
    # The damping of `C` is relative in the one and absolute in the other.
    epsilon, covariance = 0.3, np.cov(X.T, bias=True)
    damping = epsilon * np.trace(covariance) / 5
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    optimizer = kso.NaturalNetwork(0.1, momentum=0.0, damping=damping)
    start = array(plain.layers[0].kernel)
    plain.compile(optimizer=optimizer, loss="mse")
    y = X[:, :2] ** 2
    rewhiten(model, X, epsilon)
    for each in (plain, model):
        each.train_on_batch(X, y)
    ours = array(plain.layers[0].kernel) - start
    right = model.layers[0].effective()[0] - start
    np.testing.assert_allclose(ours, right, atol=1e-4 * abs(right).max())


def test_messages():
    plain = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    with pytest.raises(ValueError, match="no whitened layer"):
        rewhiten(plain, X[:, :3])
    with pytest.raises(ValueError, match="has none. Build it with use_bias=True"):
        layer = WhitenedDense(2, use_bias=False)
        layer.build((None, 3))
        layer.set_whitening(np.zeros(3), np.eye(3), 0.1)
    layer = WhitenedDense(2)
    layer.build((None, 3))
    for epsilon in (0.0, np.nan, "a"):
        with pytest.raises(ValueError, match="`epsilon` must be above 0"):
            layer.set_whitening(np.zeros(3), np.eye(3), epsilon)
    with pytest.raises(ValueError, match="The inputs must be finite, and there must"):
        layer.set_whitening(np.zeros(3), np.full((3, 3), np.nan), 0.1)
    white = whiten(plain)
    with pytest.raises(ValueError, match="The inputs must be finite, and there must"):
        rewhiten(white, X[:0, :3])
    white.layers[0].enable_lora(1)
    with pytest.raises(ValueError, match="with LoRA enabled"):
        rewhiten(white, X[:, :3])

    class Subclassed(keras.Model):
        def call(self, x):
            return plain(x)

    subclassed = Subclassed()
    subclassed(X[:, :3])
    for wrong in (keras.layers.Dense(3), keras.Sequential(), subclassed):
        with pytest.raises(ValueError, match="takes a built Sequential or functional"):
            whiten(wrong)
    for every in (0, 1.5):
        with pytest.raises(ValueError, match="`every` must be an integer"):
            Rewhitening(X, every=every)
    for momentum in (2.0, -1.0, np.nan):
        with pytest.raises(ValueError, match="`momentum` must be at least 0"):
            MeanOnlyBatchNormalization(momentum=momentum)
    for axis in ([1], 5):
        with pytest.raises(ValueError, match="`axis` must be one axis of the input"):
            MeanOnlyBatchNormalization(axis=axis)(X)
