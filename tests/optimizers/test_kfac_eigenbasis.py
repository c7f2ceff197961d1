"""KFAC in the eigenbasis through `fit`: dead units, failures, resuming, all layers."""

import keras
import numpy as np
import problems
import pytest
from keras import layers
from training.loop import (
    arrays,
    assert_equal,
    compiled,
    fit,
    kinds,
    moved,
    restore,
    state,
)

import keras_secondorder as kso
from keras_secondorder.arguments import check_together

DEAD_INPUTS, DEAD_UNIT, EPOCHS = [0, 7, 8, 19], 2, 4


def optimizer():
    """Bases at steps 0 1 2 5 10 15, statistics at 0 1 2 4 6 8 10 12 14 16."""
    return kso.KFAC(
        approximation="eigenvalue_corrected",
        tikhonov="exact",
        damping=0.3,
        inverse_every=5,
        seed=1,
    )


def examples():
    rng = np.random.default_rng(0)
    x = rng.uniform(size=(24, 20)).astype("float32")
    x[:, DEAD_INPUTS] = 0.0
    return x, np.argmax(x @ rng.normal(size=(20, 3)), axis=1)


class Run:
    """A run of 12 steps, with what it was like before and after each epoch."""

    def __init__(self):
        hidden = layers.Dense(6, activation="relu")
        model = problems.sequential([hidden, layers.Dense(3)], (20,), scale=0.3)
        bias = np.full(6, 1.0, "float32")  # the others see most inputs
        bias[DEAD_UNIT] = -100.0
        hidden.bias.assign(bias)
        self.model = compiled(model, optimizer())
        self.states = [state(self.model)]
        self.losses = []
        for epoch in range(EPOCHS):
            history = fit(
                model, *examples(), initial_epoch=epoch, epochs=epoch + 1, verbose=0
            )
            self.losses += history["loss"]
            self.states.append(state(model))


@pytest.fixture(scope="module")
def run():
    return Run()


def test_r1_r2_dead_inputs_and_units_stay_to_the_last_bit(run):
    """While no rounding moves them, everything else moves."""
    (kernel, bias, after, _), (new, new_bias, new_after, _) = (
        run.states[i][:4] for i in (0, -1)
    )
    np.testing.assert_array_equal(new[DEAD_INPUTS], kernel[DEAD_INPUTS])
    np.testing.assert_array_equal(new[:, DEAD_UNIT], kernel[:, DEAD_UNIT])
    np.testing.assert_array_equal(new_bias[DEAD_UNIT], bias[DEAD_UNIT])
    np.testing.assert_array_equal(new_after[DEAD_UNIT], after[DEAD_UNIT])
    alive = np.delete(np.delete(new != kernel, DEAD_INPUTS, 0), DEAD_UNIT, 1)
    assert alive.mean() > 0.9
    assert all(np.isfinite(a).all() for a in run.states[-1] if a.size > 1)
    assert run.losses[-1] < 0.8 * run.losses[0]


def test_a_failed_decomposition_keeps_the_last_good_basis(run):
    """Steps 12 to 17, of which 15 refreshes the bases."""
    restore(run.model, run.states[-1])
    first, other = run.model.optimizer.blocks
    good, weights = arrays(first.inverses), arrays(run.model.weights)
    first.A.assign(np.full(first.A.shape, np.nan, "float32"))
    history = fit(run.model, *examples(), epochs=2)
    assert_equal(arrays(first.inverses), good)
    assert int(run.model.optimizer.curvature.failed) == 1
    assert np.isfinite(history["loss"]).all()
    assert all(np.isfinite(a).all() for a in arrays(other.inverses))
    assert all(moved(arrays(run.model.weights), weights))


def test_r4_a_batch_with_nan_changes_nothing(run):
    restore(run.model, run.states[2])
    x, y = examples()
    x[3, 4] = np.nan
    fit(run.model, x[:8], y[:8])
    skipped = int(run.model.optimizer.skipped_steps)
    assert skipped == 1
    variables = [v for block in run.model.optimizer.blocks
                 for v in [*block.factors, *block.inverses]]  # fmt: skip
    now = arrays([*run.model.weights, *variables])
    restore(run.model, run.states[2])
    assert_equal(now, arrays([*run.model.weights, *variables]))


def test_r20_resumes_between_two_refreshes_of_the_basis(run, tmp_path):
    """After step 8: the bases are of step 5, and the moments have moved since."""
    restore(run.model, run.states[3])
    run.model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.get_config() == run.model.optimizer.get_config()
    fit(loaded, *examples(), initial_epoch=3, epochs=EPOCHS)
    assert_equal(state(loaded), run.states[-1])


@pytest.fixture(scope="module")
def deep():
    """Embedding, groups, two maps in a layer, unitwise, a loop, and a fallback."""
    model = keras.Sequential(
        [
            keras.Input((6,), dtype="int32"),
            layers.Embedding(11, 4),
            layers.Conv1D(6, 3, groups=2, activation="tanh"),
            layers.SeparableConv1D(4, 2),
            layers.LayerNormalization(),
            layers.PReLU(),
            layers.LSTM(3),
            layers.Dense(3),
        ]
    )
    problems.fill(model)
    return compiled(model, optimizer())


def test_trains_with_every_kind_of_block(deep):
    ids = np.random.default_rng(0).integers(0, 11, (24, 6)).astype("int32")
    before = arrays(deep.trainable_variables)
    history = fit(deep, ids, ids[:, 0] % 3, epochs=20)
    assert history["loss"][-1] < 0.8 * history["loss"][0]
    assert history["skipped_steps"][-1] == 0
    assert all(np.isfinite(a).all() for a in state(deep) if a.size > 1)
    assert all(moved(arrays(deep.trainable_variables), before))
    assert set(kinds(deep).values()) == {"corrected", "unitwise", "diagonal"}


def test_the_memory_plan_counts_the_eigenvalues(deep):
    deep.optimizer.build(deep.trainable_variables)
    planned = kso.coverage(deep)
    for block, plan in zip(deep.optimizer.blocks, planned, strict=True):
        kept = {id(v): v for v in [*block.factors, *block.inverses]}
        assert plan.bytes == 4 * sum(np.prod(v.shape) for v in kept.values())


def test_form_and_damping_that_do_not_go_together():
    with pytest.raises(ValueError, match="form='a' goes with `size` one of"):
        check_together("form", "a", "size", 3, {"a": (1, 2), "b": (3,)})
    with pytest.raises(ValueError, match="`tikhonov` must be one of"):
        kso.KFAC(tikhonov="none")
    optimizer = kso.KFAC(tikhonov="exact")
    assert kso.KFAC.from_config(optimizer.get_config()).tikhonov == "exact"
