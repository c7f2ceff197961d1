"""Whitened convolutions: the function, its borders, the whitening, the steps."""

import itertools

import keras
import numpy as np
import pytest
from keras import ops

import keras_secondorder as kso
from keras_secondorder.layers import WhitenedConv2D, rewhiten, whiten

L = keras.layers
RNG = np.random.default_rng(0)
# What float32 sums leave of an unchanged function, relative to its largest value.
RTOL = 1e-5
# The layer, and the spatial shape of its input.
LAYERS = {
    "1d causal dilated": (L.Conv1D, {"dilation_rate": 2, "padding": "causal"}, (9,)),
    "1d same strided": (L.Conv1D, {"strides": 2, "padding": "same"}, (9,)),
    "2d same": (L.Conv2D, {"padding": "same"}, (6, 5)),
    "2d same strided": (L.Conv2D, {"strides": 2, "padding": "same"}, (7, 6)),
    "2d same dilated": (L.Conv2D, {"dilation_rate": 2, "padding": "same"}, (6, 7)),
    "2d valid strided": (L.Conv2D, {"strides": (2, 1)}, (7, 6)),
    "2d channels first": (
        L.Conv2D,
        {"padding": "same", "data_format": "channels_first"},
        (6, 5),
    ),
    "3d same": (L.Conv3D, {"padding": "same"}, (4, 5, 3)),
}


def array(tensor):
    return ops.convert_to_numpy(tensor)


def case(name):
    """A model of one convolution, and inputs whose mean is far from zero."""
    kind, arguments, spatial = LAYERS[name]
    first = arguments.get("data_format") == "channels_first"
    if first and keras.config.backend() == "tensorflow":
        pytest.skip("TensorFlow has no such convolution on a CPU.")
    shape = (2, *spatial) if first else (*spatial, 2)
    keras.utils.set_random_seed(0)
    layer = kind(4, 3, activation="tanh", bias_initializer="normal", **arguments)
    x = 3.0 + RNG.normal(size=(20, *shape))
    x = x + np.roll(x, 1, axis=-2)  # neighbours are alike
    return keras.Sequential([keras.Input(shape), layer]), x.astype("float32")


def patches(x, layer):
    """`(rows, kernel entries * channels)`, each entry looked up by itself."""
    if layer.data_format == "channels_first":
        x = np.moveaxis(x, 1, -1)
    steps, spreads = layer.strides, layer.dilation_rate
    pads, sizes = [], []
    sides = zip(x.shape[1:-1], layer.kernel_size, steps, spreads, strict=True)
    for n, k, s, d in sides:
        reach = (k - 1) * d + 1
        out = -(-n // s) if layer.padding != "valid" else (n - reach) // s + 1
        total = max((out - 1) * s + reach - n, 0)
        before = {"valid": 0, "same": total // 2, "causal": total}[layer.padding]
        pads.append((before, total - before))
        sizes.append(out)
    x = np.pad(x, [(0, 0), *pads, (0, 0)])
    rows = []
    for position in itertools.product(*map(range, sizes)):
        entries = []
        for entry in itertools.product(*map(range, layer.kernel_size)):
            at = np.multiply(position, steps) + np.multiply(entry, spreads)
            entries.append(x[(slice(None), *at)])
        rows.append(np.concatenate(entries, axis=-1))
    return np.concatenate(rows).astype("float64")


@pytest.mark.parametrize("name", LAYERS)
def test_the_function_is_unchanged_at_each_refresh(name):
    plain, x = case(name)
    model = whiten(plain)
    right = array(plain(x))
    for data in (None, x, 2.0 * x[:10] - 1.0, x[:1]):  # the last is singular
        if data is not None:
            rewhiten(model, data, 0.01)
        error = np.abs(array(model(x)) - right).max()
        assert error <= RTOL * np.abs(right).max()
    K, b = model.layers[0].effective()
    for ours, theirs in zip((K, b), plain.layers[0].get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4 * abs(theirs).max())
    assert np.abs(array(model.layers[0].mean)).max() > 1.0


@pytest.mark.parametrize("name", LAYERS)
def test_the_patches_are_white(name):
    plain, x = case(name)
    model = whiten(plain)
    rewhiten(model, x, 1e-7)
    (layer,) = model.layers
    p = patches(x, layer)
    np.testing.assert_allclose(array(layer.mean), p.mean(0), rtol=1e-5)
    h = (p - p.mean(0)) @ array(layer.whitening)
    np.testing.assert_allclose(h.T @ h / len(h), np.eye(h.shape[1]), atol=1e-2)


def test_a_whitened_network_under_sgd_takes_the_steps_of_natural_network():
    """`NaturalNetwork` on the plain model, for the layer's kernel."""
    plain, x = case("2d same strided")
    model, start = whiten(plain), array(plain.layers[0].kernel)
    # The damping of `C` is relative in the one and absolute in the other.
    p, epsilon = patches(x, plain.layers[0]), 0.3
    damping = epsilon * np.trace(np.cov(p.T, bias=True)) / p.shape[1]
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    optimizer = kso.NaturalNetwork(0.1, momentum=0.0, damping=damping)
    plain.compile(optimizer=optimizer, loss="mse")
    # Steps far above the rounding of the weights.
    y = 20.0 * array(plain(x)) ** 2
    rewhiten(model, x, epsilon)
    for each in (plain, model):
        each.train_on_batch(x, y)
    ours = array(plain.layers[0].kernel) - start
    right = model.layers[0].effective()[0] - start
    np.testing.assert_allclose(ours, right, atol=1e-4 * abs(right).max())


def test_saving_and_layers_that_stay_as_they_are(tmp_path):
    inputs = keras.Input((6, 6, 4))
    h = L.Conv2D(4, 3, padding="same")(inputs)
    h = L.Conv2D(4, 3, groups=2, padding="same")(h)
    h = L.Conv2D(3, 3, use_bias=False)(L.DepthwiseConv2D(3)(h))
    model = whiten(keras.Model(inputs, L.Dense(2)(L.Flatten()(h))))
    names = [type(layer).__name__ for layer in model.layers[1:]]
    assert names == [
        *("WhitenedConv2D", "Conv2D", "DepthwiseConv2D", "Conv2D"),
        *("Flatten", "WhitenedDense"),
    ]
    x = 1.0 + RNG.normal(size=(8, 6, 6, 4)).astype("float32")
    rewhiten(model, x)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(array(again(x)), array(model(x)))


def test_groups_are_refused_by_name():
    with pytest.raises(ValueError, match="WhitenedConv2D whitens all input channels"):
        WhitenedConv2D(4, 3, groups=2)


def test_kfac_does_not_take_it_for_a_plain_convolution():
    """Its kernel sees other inputs than those of the layer."""
    plain, _ = case("2d same")
    kinds = [{b.kind for b in kso.coverage(m)} for m in (plain, whiten(plain))]
    assert kinds == [{"kronecker"}, {"diagonal"}]


def test_in_float64():
    if keras.backend.backend() == "jax":
        pytest.skip("JAX has float32 only, unless told otherwise.")
    layer = L.Conv2D(3, 2, dtype="float64")
    model = keras.Sequential([keras.Input((4, 4, 2), dtype="float64"), layer])
    x = RNG.normal(size=(5, 4, 4, 2))
    y = array(whiten(model)(x))
    assert y.dtype == "float64"
    np.testing.assert_allclose(y, array(model(x)), rtol=1e-6)


@pytest.mark.parametrize("adapt", ["enable_lora", "quantize"])
def test_a_layer_with_another_kernel_stays_as_it_is(adapt):
    model = keras.Sequential([keras.Input((4,)), L.Dense(3), L.Dense(2)])
    getattr(model.layers[0], adapt)({"enable_lora": 2, "quantize": "int8"}[adapt])
    x = RNG.normal(size=(5, 4)).astype("float32")
    new = whiten(model)
    assert type(new.layers[0]) is L.Dense
    np.testing.assert_allclose(array(new(x)), array(model(x)), rtol=1e-5, atol=1e-6)
