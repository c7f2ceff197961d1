"""The optimizers that solve by products: weights, precisions, shapes of models."""

import keras
import numpy as np
import pytest
from keras import layers
from optimizers import krylov_cases
from optimizers.krylov import BATCH, KINDS, OPTIMIZERS, RTOL, SMALL, finite, flat_step
from training.loop import (
    BACKEND,
    arrays,
    assert_close,
    assert_equal,
    classifier,
    compiled,
    examples,
    fit,
    moved,
    restore,
    state,
)

import keras_secondorder as kso

# On a quadratic the model is the objective, up to a damping of 1e-4.
RATIO_ATOL = 0.02


@pytest.fixture(scope="module", params=OPTIMIZERS)
def model(request):
    """One compiled step that the tests below share."""
    # Long runs of CG or BFGS on a small batch would make much of the last digit.
    kwargs = SMALL.get(request.param, {})
    model = compiled(classifier(), OPTIMIZERS[request.param](**kwargs))
    model.kind, model.initial = request.param, state(model)
    return model


def steps(model, x, y, weight=None, again=False, **kwargs):
    """From the initial state; always with weights: the step is compiled for them."""
    weight = np.ones(len(x), "float32") if weight is None else weight
    if not again:
        restore(model, model.initial)
    return fit(model, x, y, sample_weight=weight, batch_size=BATCH, **kwargs)


def test_r8_saturated_softmax(model):
    x, y = examples(BATCH)
    restore(model, model.initial)
    hidden, logits = model.get_layer("hidden"), model.get_layer("logits")
    hidden.kernel.assign(3.0 * hidden.kernel)
    logits.kernel.assign(np.float32([[100.0, -100.0, 0.0]] * 4))
    assert abs(keras.ops.convert_to_numpy(model(x))).max() > 100
    history = steps(model, x, y, again=True, epochs=4)
    assert np.isfinite(history["loss"]).all()
    if model.kind != "ksd":  # which starts from the curvature, and there is none
        assert history["loss"][-1] < history["loss"][0]
    assert history["skipped_steps"][-1] == 0
    assert finite(model)


def test_r19_zero_weights_are_training_on_the_other_rows(model):
    """Weights (2, 0) against the rows of weight 2 alone, twice each, for the mean."""
    x, y = examples(BATCH)
    x[1::2] *= 5.0  # what has no weight must not be seen
    weight = np.tile([2.0, 0.0], BATCH // 2).astype("float32")
    steps(model, x, y, weight, epochs=2)
    weighted = arrays(model.weights)
    if model.kind != "kronecker":  # which draws targets row by row
        steps(model, np.repeat(x[::2], 2, 0), np.repeat(y[::2], 2), epochs=2)
        assert_close(arrays(model.weights), weighted, RTOL)
    steps(model, x, y, epochs=2)
    differences = zip(arrays(model.weights), weighted, strict=True)
    assert max(abs(a - w).max() for a, w in differences) > 0.01


def test_learning_rate_scales_the_update(model):
    x, y = examples(BATCH)
    steps(model, x, y)
    whole, before = arrays(model.weights), model.initial[: len(model.weights)]
    restore(model, model.initial)
    model.optimizer.learning_rate.assign(0.5)
    steps(model, x, y, again=True)
    model.optimizer.learning_rate.assign(1.0)
    halves = [b + (a - b) / 2 for a, b in zip(whole, before, strict=True)]
    assert_close(arrays(model.weights), halves, 1e-5)
    assert all(moved(whole, before))


def test_no_weight_at_all(model):
    x, y = examples(BATCH)
    steps(model, x, y, np.zeros(BATCH, "float32"))
    assert_equal(arrays(model.weights), model.initial[: len(model.weights)])
    history = steps(model, x, y, again=True, epochs=4)
    assert history["loss"][-1] < history["loss"][0]
    assert finite(model)


def test_one_row_and_none(model):
    x, y = examples(BATCH)
    restore(model, model.initial)
    model.train_on_batch(x[:0], y[:0])
    assert_equal(arrays(model.weights), model.initial[: len(model.weights)])
    losses = []
    for _ in range(2):
        model.reset_metrics()
        losses.append(model.train_on_batch(x[:1], y[:1], return_dict=True)["loss"])
    assert finite(model)
    assert losses[1] < losses[0]


@pytest.mark.parametrize("kind", ["hf", "kronecker", "ng", "ksd"])
def test_r3_damping_without_a_floor(kind):
    """300 full-batch steps; elsewhere than on JAX they are slow, and start late."""
    x = np.linspace(-1, 1, 64, dtype="float32")[:, None]
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((1,)), layers.Dense(8, activation="tanh"), layers.Dense(1)]
    )
    start, count = (1.0, 300) if BACKEND == "jax" else (1e-36, 20)
    rule = kso.AdaptiveDamping(start, 1, 2 / 3, minimum=0.0, gamma_every=None)
    kwargs = {} if kind == "ksd" else {"damping": rule}
    compiled(model, OPTIMIZERS[kind](**kwargs), loss="mse")
    xs, ys = np.tile(x, (10, 1)), np.tile(np.exp(x), (10, 1))
    history = fit(model, xs, ys, batch_size=64, epochs=count // 10)
    assert np.isfinite(history["loss"]).all()
    assert np.isfinite(history.get("damping", [0.0])).all()
    assert finite(model)
    assert history["skipped_steps"][-1] == 0
    assert history["loss"][-1] < 0.1


@pytest.mark.parametrize(
    ("kind", "policy"),
    [("hf", "mixed_float16"), ("ksd", "mixed_float16"), ("ng", "mixed_bfloat16")],
)
def test_r22_mixed_precision(kind, policy):
    x, y = examples(BATCH)
    updates = {}
    for name in (policy, "float32"):
        keras.config.set_dtype_policy(name)
        try:
            kwargs = {} if kind == "ksd" else {"damping": 1.0}
            model = compiled(classifier(), OPTIMIZERS[kind](**kwargs))
        finally:
            keras.config.set_dtype_policy("float32")
        before = arrays(model.weights)
        model.train_on_batch(x, y)
        updates[name] = flat_step(model, before)
        if name == policy:
            history = fit(model, x, y, batch_size=BATCH, epochs=8)
            assert history["loss"][-1] < 0.9 * history["loss"][0]
            assert history["skipped_steps"][-1] <= 3  # of the first loss scale
            assert finite(model)
            inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
            assert all("float16" not in v.dtype for v in inner.variables)
        if kind == "ksd" or not updates[policy].any():
            return  # a search of the loss itself parts with its rounding
    # bfloat16 has 8 bits; a loss scale in the step would show as 2^15.
    low, full = updates[policy], updates["float32"]
    assert np.linalg.norm(low - full) < 0.15 * np.linalg.norm(full)


@pytest.fixture
def float64():
    """Compute in float64 in this test only."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        if BACKEND == "jax":
            import jax

            with jax.enable_x64(True):
                yield
        else:
            yield
    finally:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")


@pytest.mark.parametrize("name", ["hf, solved", "ng, cg"])
def test_steps_of_float64_models(name, float64):
    """Against the oracle, to the residual of the solvers.

    Cases whose loss is given by name: a loss object keeps the dtype it was made with.
    """
    ours, reports = krylov_cases.run.__wrapped__(name), krylov_cases.expected(name)
    assert ours["updates"].dtype == np.float64
    for update, report in zip(ours["updates"], reports, strict=True):
        error = np.linalg.norm(update - report.update)
        assert error <= 1e-5 * np.linalg.norm(report.update)


@pytest.mark.parametrize("kind", KINDS)
def test_updates_of_float64_variables_are_not_rounded(kind, float64):
    variable = keras.Variable(np.ones(1), dtype="float64")
    third = keras.ops.convert_to_tensor(np.ones(1) / 3, "float64")
    OPTIMIZERS[kind]().update_step(third, variable, 1.0)
    # Rounding to float32 on the way would be off by 1e-8.
    np.testing.assert_allclose(arrays([variable])[0], 2 / 3, rtol=1e-14)


@pytest.mark.parametrize("kind", KINDS)
def test_r13_r15_masks_and_loss_weights(kind):
    """Linear in its parameters, with dropout: a step's model is then exact.

    With other masks in the line search, or without the weights of the losses, the
    reduction ratio would not be 1.
    """
    x, _ = examples(BATCH)
    keras.utils.set_random_seed(0)
    a = keras.Input((6,), name="a")
    dropped = layers.Dropout(0.5, seed=1)(a)
    outputs = {
        "value": layers.Dense(1, name="value")(dropped),
        "other": layers.Dense(2, name="other")(a),
        "spare": layers.Dense(2, name="spare")(a),
    }
    model = keras.Model(a, outputs)
    kwargs = {} if kind == "ksd" else {"damping": 1e-4}
    loss = {"value": "mse", "other": "mse"}
    weights = {"value": 0.5, "other": 3.0}
    compiled(model, OPTIMIZERS[kind](**kwargs), loss=loss, loss_weights=weights)
    seeds = [v for v in model.non_trainable_variables if "seed" in v.path]
    spare, before = arrays(model.get_layer("spare").weights), arrays(seeds)
    y = {"value": x[:, :1] - x[:, 1:2], "other": x[:, :2]}
    first = model.train_on_batch(x, y, return_dict=True)
    np.testing.assert_allclose(first.get("rho", 1.0), 1.0, atol=RATIO_ATOL)
    model.reset_metrics()
    second = model.train_on_batch(x, y, return_dict=True)
    assert second["loss"] < 0.7 * first["loss"]
    assert_equal(arrays(model.get_layer("spare").weights), spare)
    # Keras's dropout moves its seed by one for each mask that it draws.
    (difference,) = [a - b for a, b in zip(arrays(seeds), before, strict=True)]
    assert difference.sum() == 2


@pytest.mark.parametrize("kind", KINDS)
def test_r17_targets_without_the_last_axis(kind):
    x, _ = examples(BATCH)
    y = x[:, :1] - x[:, 1:2]
    after = []
    for target in (y[:, 0], y):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
        compiled(model, OPTIMIZERS[kind](), loss="mse")
        history = fit(model, x, target, batch_size=BATCH, epochs=4)
        assert history["loss"][-1] < 0.1 * history["loss"][0]
        after.append(arrays(model.weights))
    assert_close(after[0], after[1], RTOL)


@pytest.mark.parametrize("structural", [0.0, 0.3])
def test_r17_r19_tokens_and_sequences_with_masks(structural):
    """Masked tokens (N, T, C) are not seen, also by a watched recurrent layer."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(BATCH, 5, 6)).astype("float32")
    y = np.argmax(x @ rng.normal(size=(6, 3)), -1)
    x[3, 2:], x[7, 1:] = 0.0, 0.0
    stack = [layers.Masking(), layers.Dense(3)]
    if structural:
        y, stack = y[:, 0], [stack[0], layers.SimpleRNN(4), stack[1]]
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((5, 6)), *stack])
    compiled(model, kso.HessianFree(structural_damping=structural))
    initial, after = state(model), []
    for junk in (0, 2):
        if not structural:
            y[3, 2:], y[7, 1:] = junk, junk
        restore(model, initial)
        history = fit(model, x, y, batch_size=BATCH, epochs=4)
        assert history["loss"][-1] < 0.8 * history["loss"][0]
        assert history["skipped_steps"][-1] == 0
        after.append(arrays(model.weights))
    assert_close(after[0], after[1], RTOL)


@pytest.mark.parametrize("kind", KINDS)
def test_convolutions_and_recurrent_layers(kind):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(BATCH, 5, 6)).astype("float32")
    y = np.argmax((x @ rng.normal(size=(6, 3))).sum(1), -1)
    keras.utils.set_random_seed(0)
    # Tracing a recurrent layer is dear: one of each is enough for each optimizer.
    stack = {
        "hf": [layers.Conv1D(4, 2, activation="tanh"), layers.SimpleRNN(4)],
        "ng": [layers.Conv1D(4, 2, activation="tanh"), layers.LSTM(3)],
        "ksd": [layers.LSTM(3)],
    }[kind]
    model = keras.Sequential([keras.Input((5, 6)), *stack, layers.Dense(3)])
    kwargs = {"structural_damping": 0.3} if kind == "hf" else {}
    compiled(model, OPTIMIZERS[kind](**kwargs))
    before = arrays(model.weights)
    history = fit(model, x, y, batch_size=BATCH, epochs=8)
    assert history["loss"][-1] < 0.8 * history["loss"][0]
    assert history["skipped_steps"][-1] == 0
    assert all(moved(arrays(model.weights), before))
