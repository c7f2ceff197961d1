"""R23: nothing is left behind, neither tensors nor wrappers."""

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
    live_tensors,
    restore,
    state,
)

import keras_secondorder as kso

# Attributes that a Dense layer has before it is watched.
WATCHED = ("call", "activation")


def own(model):
    """What the watching could leave in each layer: the attributes, by identity."""
    return [
        {name: id(vars(layer)[name]) for name in WATCHED if name in vars(layer)}
        for layer in model.layers
    ]


@pytest.mark.skipif(BACKEND != "torch", reason="other backends run compiled steps")
def test_r23_memory_is_constant():
    x, y = examples(16)
    damping = kso.AdaptiveDamping(1.0, every=5, gamma_every=None)
    model = compiled(classifier(), kso.KFAC(damping=damping))
    for _ in range(10):
        model.train_on_batch(x, y)
    before = live_tensors()
    for _ in range(290):
        model.train_on_batch(x, y)
    assert live_tensors() == before


class Breaks(keras.layers.Layer):
    """Raises in its call when it is told to."""

    broken = False

    def call(self, x):
        if self.broken:
            raise RuntimeError("this layer is broken")
        return x


def test_r23_wrappers_are_gone_after_fit_and_after_an_exception():
    keras.utils.set_random_seed(0)
    breaks = Breaks()
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(4, activation="tanh"),
            breaks,
            keras.layers.Dense(3),
        ]
    )
    x, y = examples(16)
    before = own(model)
    compiled(model)
    assert own(model) == before
    history = fit(model, x, y, epochs=4)
    assert own(model) == before
    assert history["loss"][-1] < history["loss"][0]
    saved = state(model)
    breaks.broken = True
    model.make_train_function(force=True)
    with pytest.raises(RuntimeError, match="this layer is broken"):
        fit(model, x[:5], y[:5])  # a new size, so that the step is traced again
    assert own(model) == before
    if BACKEND == "jax":  # Keras's trainer loses the variables with an exception
        restore(model, saved)
    assert_equal(state(model), saved)
    # The layer itself is as it was: its call gives what its weights say.
    hidden = model.layers[0]
    kernel, bias = arrays(hidden.weights)
    np.testing.assert_allclose(
        keras.ops.convert_to_numpy(hidden(x)), np.tanh(x @ kernel + bias), atol=1e-5
    )
