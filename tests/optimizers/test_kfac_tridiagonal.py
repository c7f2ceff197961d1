"""The block-tridiagonal form in training: dead units, weights, resuming."""

import keras
import numpy as np
import pytest
from keras import layers
from training.loop import (
    arrays,
    assert_equal,
    compiled,
    examples,
    fit,
    restore,
    state,
)

import keras_secondorder as kso

FEATURES = 6
DEAD_INPUT, DEAD_UNIT = 2, 1  # of the data, and of the first layer


def network():
    """6-8-5-8-3 with one rectifier that never opens."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((FEATURES,)),
            layers.Dense(8, activation="relu"),
            layers.Dense(5, kernel_regularizer=keras.regularizers.L2(1e-3)),
            layers.Activation("tanh"),
            layers.Dense(8, activation="tanh", use_bias=False),
            layers.Dense(3),
        ]
    )
    bias = np.zeros(8, "float32")
    bias[DEAD_UNIT] = -100.0
    model.layers[0].bias.assign(bias)
    return model


@pytest.fixture(scope="module")
def model():
    """One compiled step that the tests share."""
    rule = kso.AdaptiveDamping(0.5, every=2, gamma_every=None, relative=True)
    optimizer = kso.KFAC(
        damping=rule, inverse_every=7, approximation="block_tridiagonal"
    )
    model = compiled(network(), optimizer)
    model.initial = state(model)
    return model


def test_all_layers_are_linked(model):
    assert model.optimizer.curvature.links == [(0, 1), (1, 2), (2, 3)]


def test_r1_r2_dead_inputs_and_units(model):
    restore(model, model.initial)
    before = arrays(model.layers[0].weights)
    history = fit(model, *examples(64), epochs=20)
    kernel, bias = arrays(model.layers[0].weights)
    assert all(np.isfinite(a).all() for a in state(model) if a.dtype.kind == "f")
    assert history["skipped_steps"][-1] == 0
    assert int(model.optimizer.curvature.failed) == 0
    assert history["loss"][-1] < 0.3 * history["loss"][0]
    np.testing.assert_array_equal(kernel[DEAD_INPUT], before[0][DEAD_INPUT])
    np.testing.assert_array_equal(kernel[:, DEAD_UNIT], before[0][:, DEAD_UNIT])
    assert bias[DEAD_UNIT] == before[1][DEAD_UNIT]
    alive = np.delete(np.delete(kernel - before[0], DEAD_INPUT, 0), DEAD_UNIT, 1)
    assert (alive != 0).all()


def factors_after(model, x, y, weights):
    restore(model, model.initial)
    model.train_on_batch(x, y, weights)
    return arrays([f for b in model.optimizer.blocks for f in b.factors])


def test_sample_weights_count_in_the_moments_between_layers(model):
    """R19: rows of weight zero say nothing; twice the weight is twice the curvature.

    `A` is a mean and stays. Rows are a sixteenth of the targets drawn, so that the
    draws of the others are the same.
    """
    x, y = examples(16)
    weights = np.ones(16, "float32")
    weights[8:] = 0.0
    once = factors_after(model, x, y, weights)
    other = np.concatenate([x[:8], 7.0 + x[8:]])
    assert_equal_up_to_rounding(factors_after(model, other, y, weights), once)
    twice = factors_after(model, x, y, 2.0 * weights)
    count = 0
    for block in model.optimizer.blocks:
        half = len(block.factors) // 2
        for k in range(2 * half):
            scale = 1.0 if k < half else 2.0
            np.testing.assert_allclose(
                twice[count], scale * once[count], rtol=1e-4, atol=1e-6
            )
            count += 1


def assert_equal_up_to_rounding(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-6)


def test_r20_continuing_from_a_file(model, tmp_path):
    """In the middle of an interval of inverses, at step 10."""
    restore(model, model.initial)
    x, y = examples(40)
    fit(model, x, y, epochs=2)
    model.save(tmp_path / "two.keras")
    fit(model, x, y, epochs=4, initial_epoch=2)
    final = state(model)
    loaded = keras.models.load_model(tmp_path / "two.keras")
    assert loaded.optimizer.approximation == "block_tridiagonal"
    fit(loaded, x, y, epochs=4, initial_epoch=2)
    assert_equal(state(loaded), final)


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_other_fisher_matrices(fisher):
    optimizer = kso.KFAC(fisher=fisher, approximation="block_tridiagonal")
    model = compiled(network(), optimizer)
    history = fit(model, *examples(32), batch_size=32, epochs=6)
    assert history["skipped_steps"][-1] == 0
    assert history["loss"][-1] < history["loss"][0]
    block = model.optimizer.blocks[0]
    A, A_ij, G, G_ij = arrays(block.factors)
    A_j, G_j = (f for f in arrays(model.optimizer.blocks[1].factors)[::2])
    for own, cross, other in ((A, A_ij, A_j), (G, G_ij, G_j)):
        joint = np.block([[own, cross], [cross.T, other]]).astype(float)
        least = np.linalg.eigvalsh(joint)[0]
        assert least > -1e-5 * np.trace(joint)  # moments of one set of numbers
        assert abs(cross).max() > 1e-3 * abs(own).max()
