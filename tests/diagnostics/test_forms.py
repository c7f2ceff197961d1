"""Every form of K-FAC can be looked at: its moments, and `A V G`."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_secondorder as kso
from keras_secondorder.curvature import APPROXIMATIONS
from keras_secondorder.diagnostics.layers import gains, layers

X = np.random.default_rng(0).normal(size=(48, 5)).astype("float32")
FORMS = [*({"approximation": name} for name in APPROXIMATIONS), {"tikhonov": "exact"}]


@pytest.mark.parametrize("form", FORMS, ids=lambda f: next(iter(f.values())))
def test_moments_products_and_the_report(form, capsys):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(2, activation="tanh"),
            keras.layers.LayerNormalization(),
            keras.layers.Dense(3, activation="tanh"),
            keras.layers.Dense(1),
        ]
    )
    optimizer = kso.KFAC(damping=0.3, **form)
    model.compile(optimizer=optimizer, loss="mse")
    # The report looks at the network.
    monitor = kso.callbacks.CurvatureMonitor(network_every=0, max_overhead=None)
    x, y = X[:, :3], X[:, :1]
    model.fit(x, y, batch_size=24, epochs=2, verbose=0, callbacks=[monitor])
    # Of factors that are not damped, as the product is, there is no such number.
    damped = {"A_condition", "A_damping_share", "G_condition", "G_damping_share"}
    seen = {f"Layers/{model.layers[0].name}/{name}" for name in damped | {"A_trace"}}
    expected = seen if "tikhonov" not in form else {t for t in seen if "trace" in t}
    assert seen & {*monitor.latest()} == expected
    assert all(np.isfinite(v) for v in monitor.latest().values())
    found = layers(optimizer)
    blocks = [b for b in optimizer.blocks if b.factors]
    assert len(found) == len(blocks) == 4
    v = [ops.ones(w.shape) for w in model.trainable_variables]
    product = iter(optimizer.curvature.multiply(v))
    for layer, block in zip(found, blocks, strict=True):
        ours = [ops.convert_to_numpy(next(product)) for _ in block.variables]
        if layer.kind != "kronecker":
            continue
        A, G = (factor.matrix for factor in layer.factors)
        for factor in layer.factors:
            right = np.linalg.eigvalsh(factor.matrix)
            np.testing.assert_allclose(factor.eigenvalues, right, atol=1e-6)
        right = A @ np.ones((len(A), len(G))) @ G
        np.testing.assert_allclose(np.vstack(ours), right, rtol=1e-4, atol=1e-6)
    assert set(gains(optimizer, v)) == {layer.name for layer in found}
    kso.diagnostics.report(model, x, y)
    assert "dense" in capsys.readouterr().out


def test_a_report_before_the_first_step_has_no_factors():
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2)])
    model.compile(optimizer=kso.KFAC(), loss="mse")
    for arguments, message in (
        ((X, X[:9, :2]), "as many rows as each other. Received 48, 9"),
        ((X, X[:, :2], None, -3), "`rows` must be an integer of at least 2"),
        ((X, X[:, :2], None, 2.5), "`rows` must be an integer"),
        ((X, X[:, :2], None, 48, 0), "`top` must be an integer of at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            kso.diagnostics.report(model, *arguments)
    for call in (kso.diagnostics.plot, kso.coverage):
        with pytest.raises(ValueError, match="must be .*Received"):
            call(keras.layers.Dense(2))
    with pytest.warns(UserWarning, match="KFAC has taken no step yet"):
        found = kso.diagnostics.report(model, X, X[:, :2])
    assert found.layers == [] and found.errors == {} and found.gains == {}
    assert found.hessian.trace > 0
