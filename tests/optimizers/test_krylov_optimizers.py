"""What every optimizer that solves by products must survive in `fit`."""

import keras
import numpy as np
import problems
import pytest
from keras import ops

import keras_secondorder as kso

DATA = problems.classification(96)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
OPTIMIZERS = {
    "hessian-free": lambda **o: kso.HessianFree(cg_iterations=10, **o),
    "kronecker": lambda **o: kso.HessianFree(
        preconditioner="kronecker", cg_iterations=5, **o
    ),
    "natural gradient": lambda **o: kso.NaturalGradient(solver_iterations=5, **o),
    "krylov subspace": lambda **o: kso.KrylovSubspaceDescent(
        basis_size=4, bfgs_iterations=4, **o
    ),
}


@pytest.fixture(params=list(OPTIMIZERS))
def make(request):
    return OPTIMIZERS[request.param]


def normalized():
    return problems.sequential(
        [
            problems.dense(5),
            keras.layers.BatchNormalization(momentum=0.5),
            keras.layers.Activation("tanh"),
            problems.dense(problems.CLASSES),
        ],
        seed=1,
    )


def values(model):
    return [ops.convert_to_numpy(v) for v in model.variables]


def test_r13_r4_statistics_move_once_a_step_and_a_nan_batch_is_skipped(make):
    """In one model: its step is compiled once."""
    model = normalized()
    model.compile(optimizer=make(), loss=LOSS)
    x, y = DATA.x, DATA.classes
    kernel, bias = (ops.convert_to_numpy(v) for v in model.layers[0].weights)
    mean = (x @ kernel + bias).mean(0)
    first = model.train_on_batch(x, y, return_dict=True)["loss"]
    # Momentum 1/2 from zero; a second forward pass would give 3/4 of the mean.
    moved = ops.convert_to_numpy(model.layers[1].moving_mean)
    np.testing.assert_allclose(moved, mean / 2, rtol=1e-5, atol=1e-6)
    bad = x.copy()
    bad[3, 0] = np.nan
    before = values(model)
    logs = model.train_on_batch(bad, y, return_dict=True)
    assert logs["skipped_steps"] == 1
    for old, new in zip(before, values(model), strict=True):
        np.testing.assert_array_equal(old, new)
    model.reset_metrics()
    for _ in range(2):
        logs = model.train_on_batch(x, y, return_dict=True)
    assert logs["loss"] < first
    assert logs["skipped_steps"] == 1


def test_recurrent_two_outputs_and_structural_damping():
    """R15: two losses with weights, one output without; a recurrent layer."""
    inputs = keras.Input((4, 3))
    h = keras.layers.LSTM(3, name="memory")(inputs)
    kinds = {"a": None, "b": "sigmoid", "c": None}
    heads = [problems.dense(1, kind, name=n)(h) for n, kind in kinds.items()]
    model = keras.Model(inputs, dict(zip("abc", heads, strict=True)))
    model.compile(
        optimizer=OPTIMIZERS["hessian-free"](structural_damping=0.1),
        loss={"a": "mse", "b": "binary_crossentropy"},
        loss_weights={"a": 2.0, "b": 0.5},
    )
    random = np.random.default_rng(0)
    x = random.normal(size=(70, 4, 3)).astype("float32")
    y = {"a": x[:, 0, :1], "b": (x[:, 1, :1] > 0).astype("float32")}
    history = model.fit(x, y, batch_size=70, epochs=5, verbose=0).history
    assert history["loss"][-1] < history["loss"][0]


def test_messages():
    with pytest.raises(ValueError, match="`curvature` must be one of"):
        kso.HessianFree(curvature="newton")
    with pytest.raises(ValueError, match="Structural damping adds to a Gauss-Newton"):
        kso.HessianFree(curvature="hessian", structural_damping=1.0)
    with pytest.raises(ValueError, match="the covariance|The covariance"):
        kso.NaturalGradient(metric="covariance", metric_data=DATA.x)
    with pytest.raises(ValueError, match="has none"):
        model = normalized()
        model.compile(optimizer=kso.HessianFree(structural_damping=1.0), loss=LOSS)


def test_damping_moves_every_so_often_and_inverses_are_kept():
    rule = kso.AdaptiveDamping(1.0, every=2, decay=2 / 3, gamma_every=None)
    optimizer = kso.HessianFree(
        damping=rule, preconditioner="kronecker", cg_iterations=3
    )
    model = problems.classifier()
    model.compile(optimizer=optimizer, loss=LOSS)
    seen = [
        model.train_on_batch(DATA.x, DATA.classes, return_dict=True)["damping"]
        for _ in range(3)
    ]
    assert seen[0] == seen[1] != seen[2]
    inverses = [v for v in optimizer.variables if "inverse" in v.path]
    assert any(np.any(ops.convert_to_numpy(v)) for v in inverses)
