"""Shapes of models, data and losses: all train, and say what they train with."""

import warnings

import keras
import numpy as np
import pytest
from keras import layers
from training.loop import (
    arrays,
    assert_close,
    assert_equal,
    compiled,
    crossentropy,
    examples,
    fit,
    kinds,
    moved,
    restore,
    state,
)

import keras_secondorder as kso

# The same sums in another order, over a few steps.
RTOL = 1e-4
STEPS = {"batch_size": 16, "epochs": 16}


def trains(model, x, y, **kwargs):
    """Full-batch steps go down, nothing is skipped; returns the history."""
    history = fit(model, x, y, **{**STEPS, **kwargs})
    assert np.isfinite(history["loss"]).all()
    assert history["loss"][-1] < 0.9 * history["loss"][0]
    assert history["skipped_steps"][-1] == 0
    return history


# R17: output width, activation, loss, and targets for logits `z` of the true model.
def _ids(z):
    return np.argmax(z, -1)


def _binary(z):
    return (z[..., 0] > 0).astype("float32")


SHAPES = {
    "mse (N,) against (N, 1)": ((6,), 1, None, "mse", lambda z: z[:, 0]),
    "sparse (N,)": ((6,), 3, None, "logits", _ids),
    "sparse (N, 1)": ((6,), 3, None, "logits", lambda z: _ids(z)[:, None]),
    "sparse (N, 1) on probabilities": (
        (6,),
        3,
        "softmax",
        "sparse_categorical_crossentropy",
        lambda z: _ids(z)[:, None],
    ),
    "sigmoid (N,)": ((6,), 1, "sigmoid", "binary_crossentropy", _binary),
    "binary logits (N, 1)": (
        (6,),
        1,
        None,
        "binary_logits",
        lambda z: _binary(z)[:, None],
    ),
    "tokens (N, T, C)": ((5, 6), 3, None, "logits", _ids),
    "segmentation (N, H, W, C)": ((3, 4, 6), 3, None, "logits", _ids),
}


@pytest.mark.parametrize("name", SHAPES)
def test_r17_shapes(name):
    shape, width, activation, loss, targets = SHAPES[name]
    rng = np.random.default_rng(0)
    x = rng.normal(size=(16, *shape)).astype("float32")
    y = targets(x @ rng.normal(size=(6, width)))
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input(shape), layers.Dense(width, activation=activation)]
    )
    loss = {
        "logits": crossentropy(),
        "binary_logits": keras.losses.BinaryCrossentropy(from_logits=True),
    }.get(loss, loss)
    trains(compiled(model, loss=loss), x, y)
    assert set(kinds(model).values()) == {"kronecker"}


def two_inputs(style):
    """Two inputs, three outputs; the third has no loss."""
    keras.utils.set_random_seed(0)
    a, b = keras.Input((6,), name="a"), keras.Input((2,), name="b")
    h = layers.Dense(4, activation="tanh", name="first")(a)
    h = layers.Concatenate()([h, layers.Dense(3, name="second")(b)])
    outputs = {
        "classes": layers.Dense(3, name="classes")(h),
        "spare": layers.Dense(2, name="spare")(h),
        "value": layers.Dense(1, name="value")(h),
    }
    inputs = {"a": a, "b": b}
    if style == "list":
        inputs, outputs = list(inputs.values()), list(outputs.values())
    return keras.Model(inputs, outputs)


def test_r15_inputs_and_outputs_in_dicts_and_lists():
    after = {style: train_two_inputs(style) for style in ("dict", "list")}
    for name in ("first", "second", "classes", "value"):
        assert_close(after["list"][name], after["dict"][name], RTOL)


def train_two_inputs(style):
    """The weights after training, by layer."""
    x, labels = examples(16)
    other = np.random.default_rng(1).normal(size=(16, 2)).astype("float32")
    data = {"a": x, "b": other}
    targets = {"classes": labels, "value": other[:, :1]}
    losses = {"classes": crossentropy(), "value": "mse"}
    loss_weights = {"classes": 0.5, "value": 2.0}
    if style == "list":
        data = list(data.values())
        targets, losses, loss_weights = (
            [d["classes"], empty, d["value"]]
            for d, empty in ((targets, other), (losses, None), (loss_weights, 0.0))
        )
    model = two_inputs(style)
    before = arrays(model.get_layer("spare").weights)
    optimizer = kso.KFAC(0.1, momentum=0.0, damping=1.0, fisher="exact")
    with warnings.catch_warnings():
        # Watching a model must not call it with inputs of another structure.
        warnings.filterwarnings("error", message="The structure of `inputs`")
        compiled(model, optimizer, loss=losses, loss_weights=loss_weights)
    trains(model, data, targets)
    assert_equal(arrays(model.get_layer("spare").weights), before)
    return {layer.name: arrays(layer.weights) for layer in model.layers}


class PullTogether(layers.Layer):
    def call(self, z):
        self.add_loss(keras.ops.mean(keras.ops.square(z - 1.0)))
        return z


def test_r15_add_loss_only():
    keras.utils.set_random_seed(0)
    x, _ = examples(16)
    model = keras.Sequential(
        [keras.Input((6,)), layers.Dense(2, name="code"), PullTogether()]
    )
    model.compile(optimizer=kso.KFAC(learning_rate=0.01))
    trains(model, x, None, epochs=20)


def test_r15_residual_nested_reshaped_and_lambda():
    keras.utils.set_random_seed(0)
    x, y = examples(16)
    inputs = keras.Input((6,))
    inner = keras.Sequential(
        [layers.Dense(8, activation="tanh"), layers.Dense(6)], name="inner"
    )
    h = layers.Add()([inputs, inner(inputs)])
    h = layers.Lambda(lambda t: 0.5 * t)(layers.Reshape((2, 3))(h))
    model = keras.Model(inputs, layers.Dense(3)(layers.Flatten()(h)))
    trains(compiled(model), x, y)
    assert list(kinds(model).values()) == ["kronecker"] * 6


def test_r13_moving_statistics_and_masks_once_a_step():
    """The adaptive rules evaluate the model several times more in each step."""
    keras.utils.set_random_seed(0)
    x, y = examples(16)
    x += 3.0
    norm = layers.BatchNormalization(momentum=0.9)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            norm,
            layers.Dense(5, activation="relu"),
            layers.Dropout(0.5, seed=1),
            layers.Dense(3),
        ]
    )
    optimizer = kso.KFAC.thesis(
        damping=kso.AdaptiveDamping(1.0, every=1, gamma_every=2), inverse_every=2
    )
    compiled(model, optimizer)
    seeds = [v for v in model.non_trainable_variables if "seed" in v.path]
    before = arrays(seeds)
    history = fit(model, x, y, **{**STEPS, "epochs": 3})
    assert np.isfinite(history["rho"]).all()
    kept = 0.9**3
    mean = keras.ops.convert_to_numpy(norm.moving_mean)
    variance = keras.ops.convert_to_numpy(norm.moving_variance)
    np.testing.assert_allclose(mean, (1 - kept) * x.mean(0), rtol=1e-5)
    np.testing.assert_allclose(
        variance, kept + (1 - kept) * x.var(0), rtol=1e-4, atol=1e-6
    )
    # Keras's dropout moves its seed by one for each mask that it draws.
    (moved,) = [a - b for a, b in zip(arrays(seeds), before, strict=True)]
    assert moved.sum() == 3
    assert "unitwise" in kinds(model).values()


class OwnDense(layers.Dense):
    def call(self, inputs):
        return super().call(inputs)


def test_layers_without_a_wrapper_train_with_the_fallback(capsys):
    keras.utils.set_random_seed(0)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(16, 6, 6, 2)).astype("float32")
    y = (x[..., 0].mean((1, 2)) > 0).astype("int32")
    model = keras.Sequential(
        [
            keras.Input((6, 6, 2)),
            layers.GlobalAveragePooling2D(),
            OwnDense(3, activation="relu"),
            layers.Dense(2),
        ]
    )
    compiled(model)
    capsys.readouterr()
    before = arrays(model.layers[1].weights)
    trains(model, x, y, epochs=40)
    said = capsys.readouterr().out
    assert all(moved(arrays(model.layers[1].weights), before))
    assert list(kinds(model).values()) == ["diagonal"] * 2 + ["kronecker"] * 2
    # Said once, where something fell back: at the first fit, and not again.
    assert said.count("no wrapper for OwnDense") == 2
    fit(model, x, y)
    assert "no wrapper" not in capsys.readouterr().out


def test_r14_shared_dense_trains():
    keras.utils.set_random_seed(0)
    x, y = examples(16)
    a, b = keras.Input((6,)), keras.Input((6,))
    twin = layers.Dense(4, activation="tanh", name="twin")
    model = keras.Model([a, b], layers.Dense(3)(layers.Subtract()([twin(a), twin(b)])))
    compiled(model)
    before = arrays(twin.weights)
    trains(model, [x, 0.5 * x], y, epochs=20)
    assert all(moved(arrays(twin.weights), before))
    assert list(kinds(model).values()) == ["kronecker"] * 4


def test_r15_shared_model_with_add_loss_and_dropout():
    """A model inside that is called twice and adds a loss at each call."""
    keras.utils.set_random_seed(0)
    x, y = examples(16)
    inner = keras.Sequential(
        [keras.Input((6,)), layers.Dense(4), PullTogether()], name="inner"
    )
    a, b = keras.Input((6,), name="a"), keras.Input((6,), name="b")
    h = layers.Dropout(0.1, seed=1)(layers.Concatenate()([inner(a), inner(b)]))
    model = keras.Model({"a": a, "b": b}, layers.Dense(3)(h))
    trains(compiled(model, kso.KFAC(0.1)), {"a": x, "b": 0.5 * x}, y, epochs=20)
    assert list(kinds(model).values()) == ["kronecker"] * 4


def test_r13_r15_all_evaluations_of_a_step_see_the_same_masks():
    """Linear in its parameters, with dropout: the quadratic model is then exact.

    Other masks in the evaluation after the step, and rho would be far from 1.
    """
    x, _ = examples(16)
    y = x @ np.random.default_rng(1).normal(size=(6, 2)).astype("float32")
    model = keras.Sequential(
        [keras.Input((6,)), layers.Dropout(0.5, seed=1), layers.Dense(2)]
    )
    # The damping belongs to the model of the loss but not to the loss.
    damping = kso.AdaptiveDamping(1e-4, every=1, gamma_every=None)
    whole = {"statistics_fraction": 1.0, "quadratic_fraction": 1.0}
    compiled(model, kso.KFAC(0.1, damping=damping, **whole), "mse")
    history = fit(model, x, y, batch_size=16, epochs=4)
    np.testing.assert_allclose(history["rho"], 1.0, rtol=0, atol=1e-2)


def test_r17_r19_masks_and_weights_of_positions():
    """A mask is weights of zero, in the factors too; unseen labels do not matter."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, 5, 6)).astype("float32")
    y = rng.integers(0, 3, (8, 5))
    weights = rng.uniform(0.5, 2.0, (8, 5)).astype("float32")
    mask = rng.uniform(size=(8, 5)) < 0.7
    x[~mask] = 0.0
    # Keras takes the mean over what the mask leaves.
    share = (mask * weights * mask.size / mask.sum()).astype("float32")
    after = []
    for masking, given, labels in (
        ([layers.Masking()], weights, y),
        ([], share, np.where(mask, y, 0)),
    ):
        keras.utils.set_random_seed(0)
        dense = [layers.Dense(4, activation="tanh"), layers.Dense(3)]
        model = keras.Sequential([keras.Input((5, 6)), *masking, *dense])
        compiled(model, kso.KFAC(0.1, damping=0.1, fisher="exact"))
        for _ in range(2):
            model.train_on_batch(x, labels, sample_weight=given)
        after.append(arrays(model.trainable_variables))
    assert_close(*after, RTOL)


def test_r19_weights_of_pixels():
    """Segmentation: labels under a weight of zero change nothing."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, 4, 4, 2)).astype("float32")
    y = (x[..., 0] > 0).astype("int32")
    weights = (rng.uniform(size=y.shape) < 0.6).astype("float32")
    keras.utils.set_random_seed(0)
    model = compiled(
        keras.Sequential([keras.Input((4, 4, 2)), layers.Conv2D(2, 3, padding="same")]),
        kso.KFAC(0.1, fisher="empirical"),
    )
    initial = state(model)
    after = []
    for labels in (y, np.where(weights > 0, y, 1 - y)):
        restore(model, initial)
        history = fit(model, x, labels, sample_weight=weights, epochs=15)
        after.append(arrays(model.trainable_variables))
    assert_equal(*after)
    assert history["loss"][-1] < 0.8 * history["loss"][0]
