"""R26: layers frozen or unfrozen between two fits: the right blocks, or advice."""

import keras
import pytest

import keras_secondorder as kso
from training.loop import BACKEND, arrays, assert_equal, classifier, compiled, examples
from training.loop import fit as quietly

# How a model goes on after the change.
AGAIN = {
    "no_recompile": lambda model: None,
    "same_optimizer": lambda model: compiled(model, model.optimizer),
    "new_optimizer": compiled,
}


def three_layers(frozen):
    model = classifier()
    model.add(keras.layers.Dense(3, name="extra"))
    model.get_layer("hidden").trainable = not frozen
    return model


@pytest.mark.parametrize("freeze", [True, False], ids=["freeze", "unfreeze"])
@pytest.mark.parametrize("again", AGAIN)
def test_r26_frozen_between_two_fits(again, freeze):
    x, y = examples(16)
    model = compiled(three_layers(frozen=not freeze))
    quietly(model, x, y)
    model.get_layer("hidden").trainable = not freeze
    if again == "no_recompile" and BACKEND == "tensorflow":
        # As in Keras, a traced step keeps what it was traced with until `compile`.
        model.make_train_function(force=True)
    before = [arrays(layer.weights) for layer in model.layers]
    try:
        AGAIN[again](model)
        quietly(model, x, y, epochs=2)
    except ValueError as error:
        assert again != "new_optimizer", error
        for word in ("trainable", "compile", "KFAC"):
            assert word in str(error)
        assert_equal([w for layer in model.layers for w in arrays(layer.weights)],
                     [w for layer in before for w in layer])
        return
    covered = [v for block in model.optimizer.blocks for v in block.variables]
    assert {id(v) for v in covered} == {id(v) for v in model.trainable_variables}
    for layer, old in zip(model.layers, before, strict=True):
        moved = [(w != o).any() for w, o in zip(arrays(layer.weights), old)]
        assert moved == [layer.trainable] * 2, layer.name


@pytest.mark.parametrize("half", ["hidden", "logits"])
def test_r16_half_of_the_layers_frozen(half):
    x, y = examples(16)
    model = classifier()
    model.get_layer(half).trainable = False
    compiled(model)
    before = [arrays(layer.weights) for layer in model.layers]
    history = quietly(model, x, y, epochs=4)
    assert history["loss"][-1] < history["loss"][0]
    for layer, old in zip(model.layers, before, strict=True):
        moved = [(w != o).any() for w, o in zip(arrays(layer.weights), old)]
        assert moved == [layer.trainable] * 2, layer.name
    (block,) = model.optimizer.blocks
    assert isinstance(block.wrapper, kso.LayerWrapper)
