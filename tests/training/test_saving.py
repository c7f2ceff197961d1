"""R20: a model that is saved and loaded goes on as if nothing had happened."""

import copy
import pickle

import keras
import pytest
from training.loop import (
    arrays,
    assert_equal,
    classifier,
    compiled,
    examples,
    fit,
    restore,
    state,
)

import keras_secondorder as kso

EPOCHS = 4  # of three steps each


def optimizer():
    """Inverses at 0 1 2 7, statistics at 0 1 2 4 6 8 10, damping at odd steps.

    Epoch 1 ends before step 3 and epoch 3 before step 9, where no statistics are due;
    epoch 2 ends before step 6, with inverses older than the statistics.
    """
    return kso.KFAC(
        damping=kso.AdaptiveDamping(0.5, every=2, gamma_every=None),
        statistics_every=2,
        inverse_every=7,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """An uninterrupted run, with a file after each epoch."""
    folder = tmp_path_factory.mktemp("run")
    x, y = examples()
    model = compiled(classifier(), optimizer(), metrics=["accuracy"])
    initial = state(model)
    path = str(folder / "{epoch}.keras")
    history = fit(
        model, x, y, epochs=EPOCHS, callbacks=[keras.callbacks.ModelCheckpoint(path)]
    )
    return model, folder, initial, state(model), history


@pytest.mark.parametrize("epoch", [1, 2])
def test_r20_continuing_from_a_checkpoint(run, epoch):
    model, folder, _, final, history = run
    loaded = keras.models.load_model(folder / f"{epoch}.keras")
    assert int(loaded.optimizer.iterations) == 3 * epoch
    assert len(loaded.optimizer.variables) == len(model.optimizer.variables)
    rest = fit(loaded, *examples(), epochs=EPOCHS, initial_epoch=epoch)
    assert_equal(state(loaded), final)
    for name, values in history.items():
        assert rest[name] == values[epoch:], name


def test_r20_continuing_from_a_weights_file(run, tmp_path):
    model, _, initial, final, _ = run
    x, y = examples()
    restore(model, initial)
    fit(model, x, y, epochs=2)
    model.save_weights(tmp_path / "two.weights.h5")
    fit(model, x, y, epochs=1)
    model.load_weights(tmp_path / "two.weights.h5")
    fit(model, x, y, epochs=EPOCHS, initial_epoch=2)
    assert_equal(state(model), final)


class Killed(Exception):
    pass


class Kill(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise Killed


def test_r20_backup_and_restore(run, tmp_path):
    _, _, initial, final, _ = run
    x, y = examples()
    # A model of its own: Keras's callback leaves its epoch in the model for good.
    model = compiled(classifier(), optimizer(), metrics=["accuracy"])

    def callbacks():
        return [keras.callbacks.BackupAndRestore(tmp_path / "backup")]

    restore(model, initial)
    with pytest.raises(Killed):
        fit(model, x, y, epochs=EPOCHS, callbacks=[*callbacks(), Kill()])
    restore(model, initial)  # as a new process would start
    history = fit(model, x, y, epochs=EPOCHS, callbacks=callbacks())
    assert len(history["loss"]) == EPOCHS - 2
    assert_equal(state(model), final)


def test_loaded_model_equals_the_saved_one(run):
    model, folder, _, _, _ = run
    loaded = keras.models.load_model(folder / f"{EPOCHS}.keras")
    assert type(loaded.optimizer) is kso.KFAC
    assert loaded.optimizer.get_config() == model.optimizer.get_config()
    assert loaded.train_step.__self__ is loaded
    x, _ = examples()
    assert_equal([loaded.predict(x, verbose=0)], [model.predict(x, verbose=0)])
    plain = keras.models.load_model(folder / f"{EPOCHS}.keras", compile=False)
    assert "train_step" not in vars(plain)


def test_pickle_and_deepcopy(run):
    model, _, _, _, _ = run
    x, y = examples()
    twin = pickle.loads(pickle.dumps(model))
    clone = copy.deepcopy(model)
    for other in (twin, clone):
        assert other.train_step.__self__ is other
        assert_equal(state(other), state(model))
    before = state(clone)
    fit(model, x, y)
    fit(twin, x, y)
    assert_equal(state(twin), state(model))
    assert_equal(state(clone), before)
    assert "train_step" in vars(model)


def test_clone_model(run):
    model, _, _, _, _ = run
    clone = keras.models.clone_model(model)  # Keras compiles it like the original
    assert clone.train_step.__self__ is clone
    assert clone.optimizer.get_config() == model.optimizer.get_config()
    # Nothing of the other's state comes along, and nothing is shared with it.
    assert int(clone.optimizer.iterations) == 0
    assert len(clone.optimizer.variables) == len(model.optimizer.variables)
    shared = {id(v) for v in clone.optimizer.variables + clone.weights}
    assert not shared & {id(v) for v in model.optimizer.variables + model.weights}
    assert model.train_step.__self__ is model


def test_a_loaded_model_keeps_its_loss_scale(tmp_path):
    x, y = examples(16)
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(3, dtype="mixed_float16")]
    )
    scaled = keras.optimizers.LossScaleOptimizer(kso.KFAC(), initial_scale=512.0)
    model.compile(scaled, "mse")
    fit(model, x, keras.utils.to_categorical(y, 3), batch_size=16)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert len(loaded.optimizer.variables) == len(model.optimizer.variables)
    assert_equal(arrays(loaded.optimizer.variables), arrays(model.optimizer.variables))
