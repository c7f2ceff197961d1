"""The optimizers that solve by products in `fit`: traces, memory, arguments."""

import warnings

import keras
import numpy as np
import pytest
from optimizers.krylov import BATCH, KINDS, OPTIMIZERS, RTOL, SMALL, finite, flat_step
from training.loop import (
    BACKEND,
    arrays,
    assert_equal,
    classifier,
    compiled,
    examples,
    fit,
    live_tensors,
)

import keras_secondorder as kso


@pytest.mark.parametrize("how", [{"jit_compile": False}, {"run_eagerly": True}])
@pytest.mark.parametrize("kind", KINDS)
def test_ways_to_compile_take_the_same_step(kind, how):
    if BACKEND == "jax" and ("jit_compile" in how or kind != "ng"):
        pytest.skip("on JAX both are the same, and slow: one of them will do")
    updates = []
    for settings in ({}, how):
        model = compiled(classifier(), OPTIMIZERS[kind](**SMALL[kind]), **settings)
        before = arrays(model.weights)
        model.train_on_batch(*examples(BATCH))
        updates.append(flat_step(model, before))
    assert updates[0].any()
    error = np.linalg.norm(updates[1] - updates[0])
    assert error < RTOL * np.linalg.norm(updates[0])


@pytest.mark.parametrize("kind", KINDS)
def test_r21_traces(kind, monkeypatch):
    """A short last batch, a schedule, and several steps at once."""
    traces, step = [], KINDS[kind].step

    def counted(self, objective):
        traces.append(1)
        return step(self, objective)

    monkeypatch.setattr(KINDS[kind], "step", counted)
    x, y = examples(8 * 10 + 3)
    rate = keras.optimizers.schedules.ExponentialDecay(0.5, 2, 0.9)
    # Keras refuses steps_per_execution on torch.
    several = {} if BACKEND == "torch" else {"steps_per_execution": 8}
    optimizer = KINDS[kind](learning_rate=rate, **SMALL[kind])
    model = compiled(classifier(), optimizer, **several)
    fit(model, x, y, epochs=3)
    assert int(optimizer.iterations) == 33
    expected = 0.5 * 0.9 ** (33 / 2)
    assert float(optimizer.learning_rate) == pytest.approx(expected, rel=1e-5)
    if BACKEND != "torch":  # which runs each step in Python
        assert len(traces) <= 2


@pytest.mark.skipif(BACKEND != "torch", reason="other backends run compiled steps")
@pytest.mark.parametrize("kind", SMALL)
def test_r23_memory_is_constant(kind):
    count = 60 if kind == "hf" else 20  # torch's steps are slow
    x, y = examples(BATCH)
    model = compiled(classifier(), OPTIMIZERS[kind](**SMALL[kind]))
    for _ in range(5):
        model.train_on_batch(x, y)
    before = live_tensors()
    for _ in range(count):
        model.train_on_batch(x, y)
    assert live_tensors() == before


@pytest.mark.parametrize("kind", KINDS)
def test_shared_arguments_and_frozen_layers(kind):
    """Averages, decay and clipping of Keras's own, with the first layer frozen."""
    model = classifier()
    model.get_layer("hidden").trainable = False
    before = arrays(model.weights)
    optimizer = OPTIMIZERS[kind](
        weight_decay=0.1, clipnorm=1e-3, use_ema=True, ema_momentum=0.5, **SMALL[kind]
    )
    compiled(model, optimizer)
    kernel, bias = model.get_layer("logits").weights
    assert optimizer.size == int(np.prod(kernel.shape)) + int(np.prod(bias.shape))
    fit(model, *examples(BATCH), batch_size=BATCH, epochs=2)
    frozen = arrays(model.get_layer("hidden").weights)
    assert_equal(frozen, before[:2])
    assert finite(model)
    # Keras decays by 0.1 of a weight and adds at most the clipped length; the average
    # of the weights after the first and the second step takes their place in the end.
    decayed = before[2] * (0.9 * 0.5 + 0.81 * 0.5)
    assert 0 < np.linalg.norm(arrays([kernel])[0] - decayed) < 3e-3


@pytest.mark.filterwarnings("ignore:The loss:UserWarning")
@pytest.mark.parametrize("preconditioner", [None, "empirical"])
def test_scale_sensitive_damping_moves_where_there_is_no_curvature(preconditioner):
    model = classifier()
    optimizer = kso.HessianFree(
        damping_matrix="diagonal", preconditioner=preconditioner
    )
    model.compile(optimizer=optimizer, loss="mae")
    x, y = examples()
    y = np.eye(3)[y] - 0.3
    before = model.test_on_batch(x, y)
    for _ in range(5):
        model.train_on_batch(x, y)
    assert model.test_on_batch(x, y) < 0.9 * before


def test_metric_data_weigh_as_much_as_the_batch():
    """Ten times the weights and the damping: the same step."""
    x, y = examples()
    y = np.eye(3)[y] - 0.3
    stepped = []
    for c in (1.0, 10.0):
        model = classifier()
        optimizer = kso.NaturalGradient(
            metric_data=x[:7] + 0.5, damping=0.1 * c, solver_iterations=100, rtol=1e-6
        )
        model.compile(optimizer=optimizer, loss="mse")
        model.train_on_batch(x, y, sample_weight=np.full(len(x), c))
        stepped.append(arrays(model.trainable_variables))
    for ours, right in zip(*stepped, strict=True):
        np.testing.assert_allclose(ours, right, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (kso.HessianFree, {"damping_matrix": "d"}, "Received damping_matrix='d'"),
        (kso.HessianFree, {"structural_damping": -0.5}, "must be at least 0. Rec"),
        (kso.HessianFree, {"cg_iterations": 0}, "must be an integer of at least 1"),
        (kso.HessianFree, {"cg_iterations": "many"}, "Received cg_iterations='many'"),
        (kso.HessianFree, {"selection_fraction": None}, "selection_fraction=None"),
        (kso.HessianFree, {"damping": [1.0]}, r"Received damping=\[1.0\]"),
        (kso.HessianFree, {"structural_layers": ["a"]}, "structural_damping=0"),
        (kso.HessianFree, {"structural_layers": "a"}, "is a list of names"),
        (kso.HessianFree, {"learning_rate": np.inf}, "above 0 and finite. Received"),
        (kso.HessianFree, {"curvature_fraction": 1.5}, "and at most 1. Received"),
        (
            kso.HessianFree,
            {"damping": "much"},
            "object or 'auto'. Received damping='much'",
        ),
        (kso.HessianFree, {"damping": float("nan")}, "Received damping=nan"),
        (kso.HessianFree, {"learning_rate": -1.0}, "`learning_rate` must be above 0"),
        (kso.NaturalGradient, {"metric": "hessian"}, r"of \('fisher', 'covariance'\)"),
        (kso.NaturalGradient, {"metric_rows": 0}, "`metric_rows` must be an integer"),
        (kso.KrylovSubspaceDescent, {"curvature": "hessian"}, "curvature='hessian'"),
        (kso.KrylovSubspaceDescent, {"basis_size": 0}, "must be an integer"),
        (kso.KrylovSubspaceDescent, {"learning_rate": -1}, "Received learning_rate=-1"),
        (kso.NaturalGradient, {"metric_data": np.ones((0, 2))}, "has no examples"),
        (kso.NaturalGradient, {"metric_data": "abc"}, "Received 'abc' among them"),
        (kso.NaturalGradient, {"metric_data": np.ones(())}, "an axis of rows"),
        (kso.NaturalGradient, {"metric_data": []}, "`metric_data` is empty"),
        (kso.NaturalGradient, {"metric_data": np.full((3, 2), np.nan)}, "finite"),
        (
            kso.NaturalGradient,
            {"metric_data": (np.ones((3, 2)), np.ones((4, 2)))},
            "as many rows",
        ),
        *(
            (make, {"gradient_accumulation_steps": 2}, "steps of single batches are")
            for make in (
                *(kso.HessianFree, kso.NaturalGradient, kso.TONGA, kso.KFAC),
                *(kso.Newton, kso.LevenbergMarquardt),
            )
        ),
    ],
    ids=str,
)
def test_wrong_arguments(make, arguments, message):
    with pytest.raises(ValueError, match=message):
        make(**arguments)


def test_batches_of_metric_data_are_joined():
    x, y = examples(6)
    optimizer = kso.NaturalGradient(metric_data=[(x[:2], y[:2]), (x[2:], y[2:])])
    for ours, right in zip(optimizer.metric_data, (x, y), strict=True):
        np.testing.assert_array_equal(ours, right)


@pytest.mark.parametrize("kind", ["hf", "ng", "ksd"])
def test_moving_statistics_that_lag_are_said(kind):
    x, y = examples(16)
    # Whether to say it is no matter of the optimizer.
    cases = ((0.99, 1), (0.5, 0)) if kind == "ng" else ((0.99, 1),)
    for momentum, expected in cases:
        model = classifier()
        model.add(keras.layers.BatchNormalization(momentum=momentum, name="norm"))
        compiled(model, KINDS[kind](**SMALL[kind]))
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            fit(model, x, y, epochs=2)
        told = [w for w in seen if "moving statistics of norm" in str(w.message)]
        assert len(told) == expected


@pytest.mark.parametrize("seed", [None, 3])
def test_dropout_masks_are_the_same_in_all_evaluations_of_a_step_r13(seed):
    """With much damping the model is exact, and what differs is the masks alone."""
    x, y = examples(48)
    model = classifier()
    model.add(keras.layers.Dropout(0.3, seed=seed))
    fractions = {"curvature_fraction": 1.0, "selection_fraction": 1.0}
    compiled(model, kso.HessianFree(damping=1000.0, **fractions))
    for _ in range(3):
        logs = model.train_on_batch(x, y, return_dict=True)
        assert abs(float(logs["rho"]) - 1.0) < 0.05 or abs(float(logs["rho"]) - 2) < 0.1


def test_metric_data_can_be_given_again_after_loading(tmp_path):
    x, y = examples(16)

    def trained(model):
        model.train_on_batch(x, y)
        return arrays(model.trainable_variables)

    optimizer = kso.NaturalGradient(metric_data=x + 0.5, **SMALL["ng"])
    model = compiled(classifier(), optimizer)
    trained(model)
    with pytest.warns(UserWarning, match="metric_data = ...` is set"):
        model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    loaded.optimizer.metric_data = x + 0.5
    assert_equal(trained(loaded), trained(model))
    with pytest.raises(ValueError, match="right after `load_model`"):
        loaded.optimizer.metric_data = x - 0.5
