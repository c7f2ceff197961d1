"""R26: layers frozen or unfrozen between two fits: the right blocks, or advice."""

import keras
import numpy as np
import pytest
from training.loop import (
    BACKEND,
    arrays,
    assert_equal,
    classifier,
    compiled,
    examples,
    fit,
    moved,
)

import keras_secondorder as kso

# How a model goes on after the change.
AGAIN = {
    "no_recompile": lambda model: None,
    "same_optimizer": lambda model: compiled(model, model.optimizer),
    "new_optimizer": compiled,
}


def half_trained(frozen):
    model = classifier()
    model.get_layer("hidden").trainable = not frozen
    return model


@pytest.mark.parametrize("freeze", [True, False], ids=["freeze", "unfreeze"])
@pytest.mark.parametrize("again", AGAIN)
def test_r26_frozen_between_two_fits(again, freeze):
    x, y = examples(16)
    model = compiled(half_trained(frozen=not freeze))
    fit(model, x, y)
    model.get_layer("hidden").trainable = not freeze
    if again == "no_recompile" and BACKEND == "tensorflow":
        # As in Keras, a traced step keeps what it was traced with until `compile`.
        model.make_train_function(force=True)
    before = [arrays(layer.weights) for layer in model.layers]
    try:
        AGAIN[again](model)
        fit(model, x, y, epochs=2)
    except ValueError as error:
        assert again != "new_optimizer", error
        for word in ("trainable", "Compile", "KFAC"):
            assert word in str(error)
        if BACKEND != "jax":  # where Keras's trainer loses the variables with it
            after = [arrays(layer.weights) for layer in model.layers]
            assert_equal(sum(after, []), sum(before, []))
        return
    covered = [v for block in model.optimizer.blocks for v in block.variables]
    assert {id(v) for v in covered} == {id(v) for v in model.trainable_variables}
    for layer, old in zip(model.layers, before, strict=True):
        assert moved(arrays(layer.weights), old) == [layer.trainable] * 2, layer.name


@pytest.mark.parametrize("half", ["hidden", "logits"])
def test_r16_half_of_the_layers_frozen(half):
    x, y = examples(16)
    model = classifier()
    model.get_layer(half).trainable = False
    compiled(model)
    before = [arrays(layer.weights) for layer in model.layers]
    history = fit(model, x, y, epochs=4)
    assert history["loss"][-1] < history["loss"][0]
    for layer, old in zip(model.layers, before, strict=True):
        assert moved(arrays(layer.weights), old) == [layer.trainable] * 2, layer.name
    (block,) = model.optimizer.blocks
    assert isinstance(block.wrapper, kso.LayerWrapper)


@pytest.mark.parametrize("make", [kso.KFAC, kso.HessianFree, kso.TONGA])
def test_nothing_to_train_is_trained_as_keras_does(make):
    """Nothing moves, and a warning says so."""
    x, y = examples(16)
    model = classifier()
    normalization = keras.layers.BatchNormalization(name="norm")
    model.add(normalization)
    for layer in model.layers:
        layer.trainable = False
    model.compile(optimizer=make(), loss="sparse_categorical_crossentropy")
    before = arrays(model.weights)
    with pytest.warns(UserWarning, match="no trainable weights"):
        history = fit(model, x, y, epochs=2)
    assert_equal(arrays(model.weights), before)
    assert np.isfinite(history["loss"]).all()


def test_an_unfrozen_layer_in_a_frozen_model_has_its_block():
    layers = keras.layers
    inner = keras.Sequential(
        [keras.Input((4,)), layers.Dense(8, "tanh"), layers.Dense(3, name="unfrozen")]
    )
    model = keras.Sequential([keras.Input((4,)), inner, layers.Dense(1)])
    inner.trainable, inner.layers[1].trainable = False, True
    found = {block.layer_name: block.kind for block in kso.coverage(model)}
    assert found == {"unfrozen": "kronecker", model.layers[-1].name: "kronecker"}
    kernel = inner.layers[1].kernel
    before = arrays([inner.layers[0].kernel, kernel])
    model.compile(optimizer=kso.KFAC(on_unsupported="error"), loss="mse")
    model.fit(np.eye(4), np.ones((4, 1)), verbose=0)
    assert moved(arrays([inner.layers[0].kernel, kernel]), before) == [False, True]
