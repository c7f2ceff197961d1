"""The hook between `compile` and the first batch."""

import gc
import warnings
import weakref

import keras
import numpy as np
import pytest
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
from keras_secondorder.likelihoods import loss_weights_of


@keras.saving.register_keras_serializable(package="test_attach")
class Subclassed(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.hidden = keras.layers.Dense(4, activation="tanh", name="hidden")
        self.logits = keras.layers.Dense(3, name="logits")

    def call(self, x):
        return self.logits(self.hidden(x))


@keras.saving.register_keras_serializable(package="test_attach")
class OwnTrainStep(Subclassed):
    def train_step(self, *args, **kwargs):
        return super().train_step(*args, **kwargs)


def functional():
    x = keras.Input((6,))
    h = keras.layers.Dense(4, activation="tanh", name="hidden")(x)
    return keras.Model(x, keras.layers.Dense(3, name="logits")(h))


def called_subclass():
    model = Subclassed()
    model(np.zeros((1, 6), "float32"))
    return model


def declared_subclass():
    """Keras says that it is built; its layers are not."""
    model = Subclassed()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.build((None, 6))
    return model


def unbuilt_sequential():
    stack = classifier().layers
    return keras.Sequential(
        [keras.layers.Dense.from_config(_config(dense)) for dense in stack]
    )


def _config(layer):
    return {k: v for k, v in layer.get_config().items() if k != "build_config"}


MODELS = {
    "functional": functional,
    "called_subclass": called_subclass,
    "declared_subclass": declared_subclass,
    "unbuilt_subclass": Subclassed,
    "unbuilt_sequential": unbuilt_sequential,
}


@pytest.fixture(scope="module")
def reference():
    """Initial and final weights of the Sequential model."""
    x, y = examples()
    model = compiled(classifier())
    initial = arrays(model.weights)
    history = fit(model, x, y, epochs=8)
    assert history["loss"][-1] < 0.8 * history["loss"][0]
    return initial, arrays(model.weights), len(model.optimizer.variables)


@pytest.mark.parametrize("kind", MODELS)
def test_every_kind_of_model_takes_the_same_steps(kind, reference):
    initial, final, count = reference
    x, y = examples()
    model = MODELS[kind]()
    model.compile(optimizer=kso.KFAC(), loss=crossentropy())
    if model.weights:
        # Keras restores no optimizer whose number of variables differs.
        assert len(model.optimizer.variables) == count
        model.set_weights(initial)
    history = fit(model, x, y, epochs=8)
    assert len(model.optimizer.variables) == count
    assert set(kinds(model).values()) == {"kronecker"}
    if kind in ("functional", "called_subclass"):
        assert_equal(arrays(model.weights), final)
    else:  # built by the first batch, from initial weights of its own
        assert history["loss"][-1] < 0.9 * history["loss"][0]


def test_unbuilt_model_is_built_by_train_on_batch(reference):
    x, y = examples()
    model = compiled(Subclassed())
    losses = [float(model.train_on_batch(x, y)[0]) for _ in range(12)]
    assert losses[-1] < 0.9 * losses[0]
    assert len(model.optimizer.variables) == reference[2]


def test_only_the_instance_is_changed():
    before = dict(vars(keras.Model)), dict(vars(keras.Sequential))
    model = compiled(classifier())
    assert model.train_step.__self__ is model
    assert "train_step" in vars(model)
    assert (dict(vars(keras.Model)), dict(vars(keras.Sequential))) == before
    assert "train_step" not in vars(classifier())


def test_hook_is_installed_once():
    before = keras.Sequential.compile
    kso.install_hook()
    assert keras.Sequential.compile is before


@pytest.mark.parametrize("optimizer", ["adam", "sgd", None])
def test_other_optimizers_are_left_alone(optimizer):
    model = classifier()
    model.compile(optimizer=optimizer, loss=crossentropy())
    assert "train_step" not in vars(model)


def test_recompiling_with_adam_is_plain_keras():
    x, y = examples()
    finals = []
    for first in (kso.KFAC(), "adam"):
        model = compiled(classifier(), first)
        model.compile(optimizer="adam", loss=crossentropy())
        assert model.train_step.__func__ is keras.Model.train_step
        fit(model, x, y, epochs=2)
        finals.append(arrays(model.weights))
    assert_equal(*finals)


def test_detach_and_attach():
    x, y = examples()
    model = compiled(classifier())
    fit(model, x, y)
    kso.detach(model)
    assert model.train_step.__func__ is keras.Model.train_step
    saved, before = state(model), arrays(model.weights)
    with pytest.raises(ValueError, match="needs to see the layers of the model"):
        fit(model, x, y)
    if BACKEND == "jax":  # Keras's trainer loses the variables with an exception
        restore(model, saved)
    assert_equal(state(model), saved)
    kso.detach(model)  # once more changes nothing
    kso.attach(model)
    fit(model, x, y)
    assert all(np.isfinite(w).all() for w in arrays(model.weights))
    assert all(moved(arrays(model.weights), before))


def test_attach_needs_one_of_our_optimizers():
    with pytest.raises(ValueError, match="`attach` needs a model compiled with"):
        kso.attach(classifier())
    with pytest.raises(ValueError, match="whose optimizer is Adam"):
        kso.attach(compiled(classifier(), "adam"))


def test_model_with_its_own_train_step_is_refused():
    with pytest.raises(ValueError, match="OwnTrainStep defines its own `train_step`"):
        compiled(OwnTrainStep())
    compiled(OwnTrainStep(), "adam")  # and only with our optimizers


def test_plain_gradients_are_refused():
    model = classifier()
    gradients = [keras.ops.zeros(v.shape) for v in model.trainable_variables]
    pairs = list(zip(gradients, model.trainable_variables, strict=True))
    for optimizer in (kso.KFAC(), compiled(model).optimizer):
        before = arrays(model.weights)
        with pytest.raises(ValueError, match="train with `fit` or `train_on_batch`"):
            optimizer.apply_gradients(pairs)
        with pytest.raises(ValueError, match="through `apply_gradients`"):
            optimizer.apply(gradients, model.trainable_variables)
        assert_equal(arrays(model.weights), before)
    with pytest.raises(ValueError, match="Import keras_secondorder before"):
        kso.KFAC().build(model.trainable_variables)


def test_optimizer_does_not_keep_its_model_alive():
    model = compiled(classifier())
    optimizer, reference = model.optimizer, weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None
    assert optimizer.built


def test_model_without_a_loss_is_refused_with_advice():
    model = classifier()
    model.compile(optimizer=kso.KFAC())
    with pytest.raises(ValueError, match=r"`loss.*compile"):
        fit(model, *examples())


@pytest.mark.skipif(BACKEND != "torch", reason="a layer around PyTorch modules")
def test_layers_whose_weights_keras_does_not_read_are_refused():
    """They would stay where they are: their gradient is zero in Keras's scopes."""
    torch = pytest.importorskip("torch")
    foreign = keras.layers.TorchModuleWrapper(torch.nn.Linear(6, 4))
    stack = keras.Sequential([keras.layers.Dense(6), foreign])
    model = keras.Sequential([keras.Input((6,)), stack, keras.layers.Dense(3)])
    message = "are read by another library.*Received a TorchModuleWrapper"
    with pytest.raises(ValueError, match=message):
        fit(compiled(model), *examples())
    foreign.trainable = False
    fit(compiled(model), *examples())


def test_loss_weights_are_those_of_the_last_compile():
    """As Keras has them in its own record, which takes TensorFlow to read."""
    model = functional()
    for given in ({"loss_weights": 3.0}, {}, {"loss_weights": [0.5]}):
        for optimizer in (kso.KFAC(), keras.optimizers.Adam()):
            model.compile(optimizer, crossentropy(), **given)
            expected = model.get_compile_config()["loss_weights"]
            assert loss_weights_of(model) == expected == given.get("loss_weights")
    model.compile(kso.KFAC(), crossentropy(), [2.0])  # by position
    assert loss_weights_of(model) == [2.0]
    loaded = keras.models.model_from_json(model.to_json())
    loaded.compile_from_config(model.get_compile_config())
    assert loss_weights_of(loaded) == [2.0]
