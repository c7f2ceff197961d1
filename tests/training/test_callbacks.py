"""Keras's callbacks and logs, with what a second-order step logs."""

import csv

import keras
import numpy as np
import pytest
from training.loop import classifier, compiled, examples, fit, restore, state

import keras_secondorder as kso

OWN = {"damping", "gamma", "learning_rate", "momentum", "skipped_steps"}


@pytest.fixture(scope="module")
def model():
    model = compiled(
        classifier(),
        kso.KFAC(0.2, 0.5, damping=0.3, norm_constraint=None, relative_step=None),
    )
    model.initial = state(model)
    return model


def test_history_has_what_each_step_used(model):
    restore(model, model.initial)
    history = fit(model, *examples(), epochs=3)
    assert set(history) == OWN | {"loss"}
    assert history["damping"] == pytest.approx([0.3] * 3)
    assert history["gamma"] == pytest.approx([0.3**0.5] * 3)
    assert history["learning_rate"] == pytest.approx([0.2] * 3)
    assert history["momentum"] == pytest.approx([0.5] * 3)
    assert history["skipped_steps"] == [0, 0, 0]


def test_adaptive_damping_logs_rho_and_the_damping_that_was_used():
    x, y = examples(16)
    rule = kso.AdaptiveDamping(0.5, every=1, gamma_every=None)
    model = compiled(classifier(), kso.KFAC(damping=rule, fisher="exact"))
    history = fit(model, x, y, batch_size=16, epochs=5)
    assert set(history) == OWN | {"loss", "rho"}
    assert np.isfinite(history["rho"]).all()
    used = 0.5
    for damping, rho in zip(history["damping"], history["rho"], strict=True):
        assert damping == pytest.approx(used, rel=1e-5)  # the first has no rho yet
        used *= 0.95 if rho > 0.75 else 1 / 0.95 if rho < 0.25 else 1.0


def test_learning_rate_callbacks(model):
    restore(model, model.initial)
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch, lr: 0.1 / 2**epoch)
    history = fit(model, *examples(), epochs=3, callbacks=[schedule])
    assert history["learning_rate"] == pytest.approx([0.1, 0.05, 0.025])
    restore(model, model.initial)
    plateau = keras.callbacks.ReduceLROnPlateau(
        monitor="loss", factor=0.5, patience=1, min_delta=100.0
    )
    history = fit(model, *examples(), epochs=4, callbacks=[plateau])
    assert history["learning_rate"] == pytest.approx([0.2, 0.2, 0.1, 0.05])


def test_files_of_logs(model, tmp_path):
    restore(model, model.initial)
    callbacks = [keras.callbacks.CSVLogger(tmp_path / "log.csv")]
    pytest.importorskip("tensorboard")
    pytest.importorskip("tensorflow")
    callbacks.append(keras.callbacks.TensorBoard(tmp_path / "board", update_freq=1))
    history = fit(model, *examples(), epochs=2, callbacks=callbacks)
    with open(tmp_path / "log.csv") as file:
        lines = list(csv.DictReader(file))
    assert OWN | {"loss", "epoch"} <= set(lines[0])  # Keras adds empty val_ columns
    for name in OWN | {"loss"}:
        logged = [float(line[name]) for line in lines]
        assert logged == pytest.approx(history[name], rel=1e-6), name
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "board" / "train"))
    events.Reload()
    assert {f"epoch_{name}" for name in OWN} <= set(events.Tags()["tensors"])


def test_early_stopping_restores_the_best_weights(model):
    restore(model, model.initial)
    stop = keras.callbacks.EarlyStopping(
        "loss", mode="max", patience=1, restore_best_weights=True
    )
    history = fit(model, *examples(), epochs=9, callbacks=[stop])
    assert len(history["loss"]) == 2  # a falling loss is no best maximum
    model.stop_training = False
