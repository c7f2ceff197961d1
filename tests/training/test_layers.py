"""Networks of every kind of layer train with `KFAC()` and nothing else changed."""

import keras
import numpy as np
import pytest
from keras import layers
from loop import kinds

import keras_secondorder as kso

RNG = np.random.default_rng(0)
CLASSES = 2


def convolutional():
    i = keras.Input((6, 6, 3))
    h = layers.Conv2D(4, 3, strides=2, padding="same")(i)
    h = layers.ReLU()(layers.BatchNormalization()(h))
    residual = layers.DepthwiseConv2D(3, padding="same")(h)
    h = layers.Add()([h, layers.GroupNormalization(2)(residual)])
    h = layers.Conv2DTranspose(3, 2, strides=2)(layers.SeparableConv2D(5, 2)(h))
    outputs = layers.Dense(CLASSES)(layers.GlobalAveragePooling2D()(h))
    x = RNG.normal(size=(32, 6, 6, 3)).astype("float32")
    return keras.Model(i, outputs), x, (x[..., 0].mean((1, 2)) > 0).astype("int32")


def transformer():
    i = keras.Input((6,), dtype="int32")
    h = layers.Embedding(11, 8)(i)
    n = layers.LayerNormalization()(h)
    h = layers.Add()([h, layers.MultiHeadAttention(2, 4)(n, n, use_causal_mask=True)])
    n = layers.RMSNormalization()(h)
    h = layers.Add()([h, layers.GroupQueryAttention(4, 2, 1)(n, n)])
    ids = RNG.integers(0, 11, (32, 6)).astype("int32")
    return keras.Model(i, layers.Dense(11)(h)), ids, ids


def recurrent():
    i = keras.Input((4, 3))
    h = layers.Masking()(i)
    simple = layers.SimpleRNN(3, return_sequences=True, recurrent_dropout=0.1)
    h = layers.Bidirectional(simple)(h)
    h = layers.GRU(3, return_sequences=True, dropout=0.1)(h)
    h = layers.LSTM(4)(h)
    x = RNG.normal(size=(32, 4, 3)).astype("float32")
    x[::3, 3] = 0.0
    return keras.Model(i, layers.Dense(CLASSES)(h)), x, (x[:, 0, 0] > 0).astype("int32")


@pytest.mark.parametrize("build", [convolutional, transformer, recurrent])
def test_trains_with_structured_blocks(build):
    keras.utils.set_random_seed(0)
    model, x, y = build()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=kso.KFAC(on_unsupported="error"), loss=loss)
    history = model.fit(x, y, batch_size=32, epochs=30, verbose=0).history
    assert history["skipped_steps"][-1] == 0
    assert history["loss"][-1] < 0.9 * history["loss"][0]
    assert set(kinds(model).values()) <= {"kronecker", "unitwise"}


@pytest.mark.slow
def test_fine_tunes_an_application():
    """A network of `keras.applications`, with all of its kinds of block."""
    model = keras.applications.MobileNetV3Small(
        weights=None, input_shape=(32, 32, 3), alpha=0.35, classes=3, minimalistic=True
    )
    for layer in model.layers[: -len(model.layers) // 6]:
        layer.trainable = False
    model.compile(
        optimizer=kso.KFAC(on_unsupported="error"),
        loss="sparse_categorical_crossentropy",
    )
    before = [keras.ops.convert_to_numpy(v) for v in model.trainable_variables]
    x = RNG.uniform(0, 255, size=(12, 32, 32, 3)).astype("float32")
    history = model.fit(x, np.arange(12) % 3, batch_size=4, verbose=0).history
    assert int(model.optimizer.iterations) == 3
    assert history["skipped_steps"][-1] == 0
    assert np.isfinite(history["loss"][-1])
    assert set(kinds(model).values()) == {"kronecker", "unitwise"}
    after = [keras.ops.convert_to_numpy(v) for v in model.trainable_variables]
    assert all((a != b).any() for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize("data_format", ["channels_last", "channels_first"])
def test_r12_convolution_with_one_position_is_dense(data_format):
    """R12: a kernel as large as the image, in either format, gives Dense's update."""
    if data_format == "channels_first" and keras.backend.backend() == "tensorflow":
        pytest.skip("TensorFlow's convolutions on a CPU have no channels_first")
    x = RNG.normal(size=(8, 3, 2, 2)).astype("float32")
    y = RNG.normal(size=(8, 5)).astype("float32")
    kernel = RNG.normal(size=(12, 5)).astype("float32")
    updates = []
    for flat in (False, True):
        first = [
            layers.Dense(5)
            if flat
            else layers.Conv2D(5, (3, 2), data_format=data_format)
        ]
        if not flat and data_format == "channels_first":
            first = [layers.Permute((3, 1, 2)), *first]
        before = [layers.Flatten()] if flat else []
        after = [] if flat else [layers.Flatten()]
        model = keras.Sequential([keras.Input((3, 2, 2)), *before, *first, *after])
        layer = (before + first)[-1]
        layer.kernel.assign(kernel.reshape(tuple(layer.kernel.shape)))
        optimizer = kso.KFAC(fisher="exact", statistics_fraction=1.0)
        model.compile(optimizer=optimizer, loss="mse")
        model.train_on_batch(x, y)
        new = keras.ops.convert_to_numpy(layer.kernel).reshape(12, 5)
        updates.append(
            np.vstack([new - kernel, keras.ops.convert_to_numpy(layer.bias)])
        )
    assert np.abs(updates[1]).max() > 1e-3
    np.testing.assert_allclose(*updates, rtol=0, atol=1e-5 * np.abs(updates[1]).max())


class Extra(layers.Layer):
    """A learned shift by a vector, and a variable without any entry."""

    def build(self, shape):
        self.none = self.add_weight(shape=(0, 3), name="none")
        self.shift = self.add_weight(shape=(shape[-1],), name="shift")

    def call(self, x):
        return x + self.shift + keras.ops.sum(self.none)


def test_a_variable_without_entries_is_no_obstacle():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), Extra(), layers.Dense(1)])
    model.compile(optimizer=kso.KFAC(), loss="mse")
    x = RNG.normal(size=(32, 3)).astype("float32")
    history = model.fit(x, x[:, :1] + 1.0, epochs=30, verbose=0).history
    assert history["skipped_steps"][-1] == 0
    assert history["loss"][-1] < 0.9 * history["loss"][0]
