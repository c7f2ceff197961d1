"""K-FAC on bad batches, dead units and vanishing damping (R1 to R4, R16)."""

import keras
import numpy as np
import pytest
from keras import layers
from training.loop import (
    BACKEND,
    arrays,
    assert_equal,
    classifier,
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


def everything(model):
    """Weights, seeds and optimizer state, without the count of skipped steps."""
    skipped = model.optimizer.skips
    variables = [v for v in model.optimizer.variables if v is not skipped]
    return arrays([*model.weights, *model.non_trainable_variables, *variables])


def finite(model):
    return all(np.isfinite(a).all() for a in everything(model) if a.size > 1)


def test_r1_dead_columns():
    rng = np.random.default_rng(0)
    x = rng.uniform(size=(96, 784)).astype("float32")
    dead = rng.choice(784, 60, replace=False)
    x[:, dead] = 0.0
    y = rng.integers(0, 10, 96)
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((784,)), layers.Dense(10)])
    compiled(model, kso.KFAC(damping=0.5))
    (before,) = arrays(model.weights[:1])
    history = fit(model, x, y, batch_size=32, epochs=4)
    (after,) = arrays(model.weights[:1])
    assert finite(model)
    assert history["skipped_steps"][-1] == 0
    np.testing.assert_array_equal(after[dead], before[dead])
    alive = np.setdiff1d(np.arange(784), dead)
    assert (after[alive] != before[alive]).all(axis=1).all()
    assert history["loss"][-1] < history["loss"][0]


def test_r2_dead_layer():
    x, y = examples(16)
    keras.utils.set_random_seed(0)
    dead = layers.Dense(
        4, activation="relu", bias_initializer=keras.initializers.Constant(-100.0)
    )
    model = keras.Sequential([keras.Input((6,)), dead, layers.Dense(3)])
    compiled(model)
    before = arrays(dead.weights)
    history = fit(model, x, y, batch_size=16, epochs=5)
    assert finite(model)
    assert history["skipped_steps"][-1] == 0
    assert_equal(arrays(dead.weights), before)
    # The next layer sees only zeros: its bias alone can move, and does.
    kernel, bias = arrays(model.layers[1].weights)
    assert (bias != 0).all()
    assert history["loss"][-1] < history["loss"][0]


def test_r3_damping_without_a_floor():
    """2,000 full-batch steps; elsewhere than on JAX they are slow, and start late.

    After 1,600 steps of sinking by 19/20 a damping of 1 is below 1e-35.
    """
    x = np.linspace(-1, 1, 64, dtype="float32")[:, None]
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((1,)), layers.Dense(8, activation="tanh"), layers.Dense(1)]
    )
    start, steps = (1.0, 2000) if BACKEND == "jax" else (1e-36, 60)
    rule = kso.AdaptiveDamping(start, minimum=0.0)
    model.compile(optimizer=kso.KFAC.thesis(damping=rule), loss="mse")
    # Epochs of ten times the same batch: an epoch costs Keras more than a step.
    history = fit(
        model,
        np.tile(x, (10, 1)),
        np.tile(np.exp(x), (10, 1)),
        batch_size=64,
        epochs=steps // 10,
    )
    assert np.isfinite(history["loss"]).all()
    assert np.isfinite(history["damping"]).all()
    assert np.isfinite(history["gamma"]).all()
    assert finite(model)
    assert history["skipped_steps"][-1] == 0
    if BACKEND == "jax":
        assert history["loss"][-1] < 1e-3 * history["loss"][0]


def test_r3_no_damping_at_all_on_a_variable_that_the_loss_never_uses():
    """A diagonal block of zeros with a damping of zero: 0 / 0."""
    x, y = examples(16)
    inputs = keras.Input((6,))
    used = layers.Dense(3)(inputs)
    spare = layers.LayerNormalization(name="spare")(inputs)
    model = keras.Model(inputs, [used, spare])
    rule = kso.AdaptiveDamping(0.0, minimum=0.0, gamma_every=None)
    compiled(model, kso.KFAC(damping=rule), loss=[crossentropy(), None])
    before = arrays(model.get_layer("spare").weights)
    history = fit(model, x, [y, x], batch_size=16, epochs=3)
    assert history["skipped_steps"][-1] == 0
    assert finite(model)
    assert_equal(arrays(model.get_layer("spare").weights), before)


@pytest.mark.parametrize("optimizer", [kso.KFAC, kso.HessianFree, kso.NaturalGradient])
def test_a_multiple_of_the_loss_has_the_same_steps(optimizer):
    """2^-20 is exact in float32, so that only constants with a unit can tell."""
    x, y = examples(256)
    often = kso.AdaptiveDamping(None, 5, minimum=None, gamma_every=None, share=0.01)
    runs = []
    for factor in (1.0, 2.0**-20):
        keras.utils.set_random_seed(0)
        options = {"fisher": "exact", "damping": often} if optimizer is kso.KFAC else {}
        model = classifier()
        model.compile(optimizer(**options), crossentropy(), loss_weights=factor)
        history = fit(model, x, y, batch_size=256, epochs=11)
        runs.append((arrays(model.weights), np.array(history["damping"]) / factor))
    (weights, damping), (scaled, scaled_damping) = runs
    assert damping[-1] != damping[0]
    # Rounding differs where a constant is added to what is scaled.
    np.testing.assert_allclose(scaled_damping, damping, rtol=1e-3)
    for a, b in zip(weights, scaled, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-2, atol=1e-3)


def regressions(optimizer, epochs, copies=1):
    """Histories for targets of the size of 1e3 and of 1e5, some batches an epoch."""
    x = np.tile(examples(64)[0], (copies, 1))
    for factor in (1e3, 1e5):
        keras.utils.set_random_seed(0)
        # The outputs start at zero, so that the residuals are the targets.
        model = keras.Sequential(
            [
                keras.Input((6,)),
                layers.Dense(8, activation="tanh"),
                layers.Dense(1, kernel_initializer="zeros"),
            ]
        )
        model.compile(optimizer(), "mse")
        y = factor * np.sin(x[:, :1])
        yield fit(model, x, y, batch_size=64, epochs=epochs)


def test_targets_of_any_size():
    for history in regressions(kso.KFAC, 25, copies=40):
        assert history["loss"][-1] < 0.1 * history["loss"][0]


def test_damping_does_not_start_from_the_size_of_the_targets():
    rule = kso.AdaptiveDamping(None, 20, minimum=None, gamma_every=None, share=0.01)

    def optimizer():
        return kso.KFAC(damping=rule, relative_step=None)

    starts = []
    for history in regressions(optimizer, 20):
        starts.append(history["damping"][0])
        assert history["loss"][-1] < 0.5 * history["loss"][0]
    np.testing.assert_allclose(starts[1], starts[0], rtol=1e-4)


@pytest.fixture(scope="module")
def model():
    """One compiled step that the tests of bad batches share."""
    model = compiled(classifier(), kso.KFAC(momentum=0.5), metrics=["accuracy"])
    model.initial = state(model)
    return model


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_r4_bad_batch_is_as_if_it_were_not_there(bad, model):
    batches = 100 if np.isnan(bad) else 20
    at, end = 8 * batches // 2, 8 * batches
    x, y = examples(end)
    x[at + 3, 1] = bad
    good = np.r_[0:at, at + 8 : end]
    restore(model, model.initial)
    expected = fit(model, x[good], y[good])
    without = everything(model)
    assert expected["skipped_steps"] == [0]
    restore(model, model.initial)
    history = fit(model, x, y)
    assert history["skipped_steps"] == [1]
    assert_equal(everything(model), without)
    assert int(model.optimizer.iterations) == batches - 1
    for name in ("loss", "accuracy"):
        assert np.isfinite(history[name][0])
        assert history[name][0] == pytest.approx(expected[name][0], rel=1e-6)


def test_r4_first_and_last_batch_bad(model):
    x, y = examples(32)
    x[0], x[-1] = np.nan, np.nan
    restore(model, model.initial)
    fit(model, x[8:24], y[8:24])
    without = everything(model)
    restore(model, model.initial)
    assert fit(model, x, y)["skipped_steps"] == [2]
    assert_equal(everything(model), without)


def test_r4_nan_label_of_a_regression():
    x, _ = examples(24)
    y = x[:, :1].copy()
    y[9] = np.nan
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
    model.compile(optimizer=kso.KFAC(), loss="mse")
    history = fit(model, x, y, epochs=5)
    assert history["skipped_steps"][-1] == 5
    assert finite(model)
    assert history["loss"][-1] < history["loss"][0]


@pytest.mark.parametrize("every", [None, 20])
def test_a_bad_first_batch_leaves_no_damping(every):
    rule = kso.AdaptiveDamping(None, gamma_every=every)
    keras.utils.set_random_seed(0)
    model = compiled(classifier(), kso.KFAC("adaptive", damping=rule))
    x, y = examples(16)
    x[0] = np.nan
    assert fit(model, x[:8], y[:8])["skipped_steps"] == [1]
    assert float(model.optimizer.gamma) == 0.0
    history = fit(model, x[8:], y[8:])
    assert history["gamma"][0] == pytest.approx(history["damping"][0] ** 0.5, rel=1e-5)


def test_a_gradient_whose_norm_overflows_is_finite():
    x, _ = examples(64)
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
    model.compile(optimizer=kso.KFAC(), loss="mse")
    history = fit(model, 1e10 * x, x[:, :1], batch_size=64, epochs=10)
    assert history["skipped_steps"][-1] == 0
    assert history["loss"][-1] < history["loss"][0]


@pytest.mark.parametrize("scale", [1e3, 0.0])
def test_an_odd_first_batch_is_forgotten(scale):
    """Steps stay as long beside the weights as without it; nor do they stop at 0."""
    x, _ = examples(64)
    y = x[:, :1]
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((6,)), layers.Dense(1, kernel_initializer="zeros")]
    )
    model.compile(optimizer=kso.KFAC(), loss="mse")
    fit(model, x, scale * y, batch_size=64)
    history = fit(model, x, y, batch_size=64, epochs=80)
    assert history["loss"][-1] < 0.1 * np.mean(y**2)


def test_a_first_loss_of_zero_with_a_gradient():
    x, _ = examples(64)
    keras.utils.set_random_seed(0)
    start = [keras.Input((6,)), layers.Dense(1, kernel_initializer="zeros")]
    model = keras.Sequential(start)
    model.compile(kso.KFAC(), lambda y, z: 0.5 * z**2 - y * z)
    history = fit(model, x, x[:, :1], batch_size=64, epochs=80)
    assert history["loss"][0] == 0
    assert history["loss"][-1] < -0.45 * np.mean(x[:, :1] ** 2)


def test_a_trained_model_is_not_undone():
    """Its loss is far below that of a constant output: steps are short."""
    x, _ = examples(256)
    y = (x[:, 0] * x[:, 1] > 0).astype("int32")
    keras.utils.set_random_seed(0)
    hidden = layers.Dense(32, activation="relu")
    model = keras.Sequential([keras.Input((6,)), hidden, layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss)
    trained = fit(model, x, y, batch_size=64, epochs=150)["loss"][-1]
    model.compile(kso.KFAC(), loss)
    again = fit(model, x, y, batch_size=64, epochs=10)["loss"]
    assert max(again) < 2 * trained


def test_batch_without_any_weight(model):
    x, y = examples(24)
    restore(model, model.initial)
    fit(model, x, y, sample_weight=np.zeros(24, "float32"))
    # Its gradient is zero, and there is no momentum yet.
    assert_equal(arrays(model.weights), model.initial[: len(model.weights)])
    assert finite(model)
    history = fit(model, x, y, sample_weight=np.ones(24, "float32"), epochs=4)
    assert history["loss"][-1] < history["loss"][0]
    assert finite(model)


def test_batch_of_one_row_and_of_none(model):
    x, y = examples(9)
    restore(model, model.initial)
    history = fit(model, x, y)  # a batch of 8 and a batch of 1
    assert np.isfinite(history["loss"][0])
    assert finite(model)
    assert int(model.optimizer.iterations) == 2
    before = everything(model)
    # The mean loss of nothing is 0 / 0 or 0, as the backend has it: no step either way.
    restore(model, model.initial)
    model.train_on_batch(x[:0], y[:0])
    assert finite(model)
    assert_equal(arrays(model.weights), model.initial[: len(model.weights)])
    assert any(moved(everything(model), before))


def test_failed_factorisation_keeps_the_last_good_inverse():
    x, y = examples(24)
    optimizer = kso.KFAC(damping=0.1, statistics_every=1000, inverse_every=1)
    model = compiled(classifier(), optimizer)
    fit(model, x, y)  # the first three steps, with statistics
    block, other = optimizer.blocks
    good = arrays(block.inverses)
    kept = arrays(other.inverses)
    indefinite = np.full(block.A.shape, 50.0, "float32")
    np.fill_diagonal(indefinite, 1.0)
    block.A.assign(indefinite)
    weights = arrays(model.weights)
    history = fit(model, x, y)
    assert_equal(arrays(block.inverses), good)
    assert_equal(arrays(other.inverses), kept)
    assert int(optimizer.curvature.failed) == 3  # one block, in each of three steps
    assert np.isfinite(history["loss"][0])
    assert finite(model)
    assert all(moved(arrays(model.weights), weights))


class Tied(keras.Model):
    """Token embeddings that are also the output projection."""

    def __init__(self):
        super().__init__()
        self.embedding = layers.Embedding(11, 4, name="tokens")
        self.hidden = layers.Dense(4, activation="tanh", use_bias=False)

    def call(self, ids):
        h = self.hidden(self.embedding(ids))
        return keras.ops.matmul(h, keras.ops.transpose(self.embedding.embeddings))


def test_r16_tied_embedding():
    ids = np.tile(np.arange(44).reshape(4, 11) % 11, (10, 1))
    keras.utils.set_random_seed(0)
    model = Tied()
    model(ids)
    compiled(model, kso.KFAC())
    before = arrays(model.weights)
    history = fit(model, ids, (ids + 1) % 11, batch_size=4, epochs=10)
    assert history["loss"][-1] < 0.9 * history["loss"][0]
    assert all(moved(arrays(model.weights), before))
    assert list(kinds(model).values()) == ["diagonal", "kronecker"]


def test_r16_lora_no_bias_and_a_branch_that_the_loss_never_uses():
    x, y = examples(16)
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6,))
    lora = layers.Dense(5, activation="tanh", name="lora")
    h = lora(inputs)
    outputs = layers.Dense(3, use_bias=False, name="plain")(h)
    spare = layers.Dense(2, name="spare")(h)
    model = keras.Model(inputs, [outputs, spare])
    lora.enable_lora(2)
    before = {layer.name: arrays(layer.trainable_variables) for layer in model.layers}
    compiled(model, kso.KFAC(0.1, damping=1.0), loss=[crossentropy(), None])
    history = fit(model, x, [y, x[:, :2]], batch_size=16, epochs=12)
    assert history["loss"][-1] < 0.9 * history["loss"][0]
    assert history["skipped_steps"][-1] == 0
    for layer in model.layers:
        for new, old in zip(
            arrays(layer.trainable_variables), before[layer.name], strict=True
        ):
            assert (new == old).all() == (layer.name == "spare"), layer.name
    by_name = {path.split("/")[-1]: kind for path, kind in kinds(model).items()}
    assert by_name["lora_kernel_a"] == by_name["lora_kernel_b"] == "kronecker"
