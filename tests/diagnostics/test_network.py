"""The curvature of a small network on one batch, against dense matrices."""

import keras
import numpy as np
import oracle
import problems
import pytest

import keras_secondorder as kso
from keras_secondorder import diagnostics
from keras_secondorder.diagnostics import network

# Lanczos stops at a residual of 1e-2 of the largest eigenvalue; an eigenvalue's error
# is then of the order of its square.
EIGENVALUE_RTOL = 1e-3
# Sums of float32 products.
RTOL = 1e-4
DATA = problems.classification(24)
PENALTY = 0.01
SAMPLES = 30  # random vectors


@pytest.fixture(scope="module")
def model():
    """Three steps of K-FAC on 6-5-3; the second layer has a penalty."""
    model = problems.sequential(
        [
            problems.dense(5, "tanh", name="hidden"),
            problems.dense(
                3, name="logits", kernel_regularizer=keras.regularizers.L2(PENALTY)
            ),
        ]
    )
    model.compile(
        optimizer=kso.KFAC(damping=0.3, fisher="exact", statistics_fraction=1.0),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    for _ in range(3):
        model.train_on_batch(DATA.x, DATA.classes, DATA.sample_weight)
    return model


@pytest.fixture(scope="module")
def probe(model):
    return diagnostics.NetworkProbe(
        model, DATA.x, DATA.classes, DATA.sample_weight, top=3, parts=4
    )


class Dense:
    """The network's gradient and matrices in float64, by the oracle."""

    def __init__(self, model):
        self.layers = problems.oracle_layers(model)
        self.w = DATA.sample_weight.astype(float) / len(DATA.x)
        self.eta = np.concatenate([q.eta.ravel() for q in self.layers])

    def gradient(self, delta=0.0, rows=slice(None), scale=1.0):
        layers = oracle.moved(self.layers, delta + np.zeros(self.eta.size))
        return oracle.gradient(
            layers, "ce_logits", DATA.x[rows], DATA.one_hot[rows], scale * self.w[rows]
        )

    def hessian(self, h=1e-5):
        steps = h * np.eye(self.eta.size)
        columns = [(self.gradient(s) - self.gradient(-s)) / (2 * h) for s in steps]
        return np.array(columns)

    def fisher(self):
        return oracle.fisher(self.layers, "ce_logits", DATA.x, self.w)


@pytest.fixture(scope="module")
def dense(model):
    return Dense(model)


@pytest.fixture(scope="module")
def density(probe):
    return probe.density(samples=SAMPLES, steps=53)


def largest(matrix, k):
    e = np.linalg.eigvalsh(matrix)
    return e[np.argsort(-abs(e))][:k]


def test_gradient(probe, dense):
    ours = np.concatenate(
        [np.ravel(keras.ops.convert_to_numpy(g)) for g in probe.gradient()]
    )
    np.testing.assert_allclose(ours, dense.gradient(), atol=RTOL)


def test_hessian_and_the_gradient_in_its_top_subspace(probe, dense):
    spectrum, share = probe.hessian()
    H = dense.hessian()
    np.testing.assert_allclose(spectrum.top, largest(H, 3), rtol=EIGENVALUE_RTOL)
    # 24 products, fewer than the 53 rows: an estimate.
    assert spectrum.trace == pytest.approx(np.trace(H), rel=0.1)
    e, Q = np.linalg.eigh(H)
    Q = Q[:, np.argsort(-abs(e))[:3]]
    g = dense.gradient()
    expected = np.sum((Q.T @ g) ** 2) / (g @ g)
    assert 0.05 < expected < 0.99
    assert share == pytest.approx(expected, abs=0.01)


def test_gauss_newton(probe, dense):
    spectrum = probe.gauss_newton()
    G = dense.fisher() + np.diag(dense.eta)
    np.testing.assert_allclose(spectrum.top, largest(G, 3), rtol=EIGENVALUE_RTOL)
    assert spectrum.trace == pytest.approx(np.trace(G), rel=0.1)


def test_density_integrates_to_one_and_has_the_moments_of_the_spectrum(density, dense):
    assert np.trapezoid(density.density, density.grid) == pytest.approx(1.0)
    e = np.linalg.eigvalsh(dense.hessian())
    mean = density.weights @ density.nodes
    # The deviation of v^T H v / v^T v, over sqrt(SAMPLES).
    noise = np.sqrt(2 * np.var(e) / (len(e) + 2) / SAMPLES)
    assert abs(mean - e.mean()) <= 4 * noise


def test_shares_of_eigenvalues_that_stand_out_from_zero(
    probe, density, dense, monkeypatch
):
    """Counted for few parameters, and estimated for many from the quadrature."""
    e = np.linalg.eigvalsh(dense.hessian())
    bound = 0.01 * abs(e).max()
    expected = (e > bound).mean(), (e < -bound).mean()
    assert min(expected) > 0.05 and sum(expected) < 0.95
    found = probe.shares(density)
    assert found.exact
    assert found[:2] == pytest.approx(expected)
    monkeypatch.setattr(network, "MAX_EXACT_PRODUCTS", 0)
    found = probe.shares(density)
    assert not found.exact
    for share, right in zip(found[:2], expected, strict=True):
        # The deviation of the share of a random vector's square, over sqrt(SAMPLES).
        noise = np.sqrt(2 * right * (1 - right) / (len(e) + 2) / SAMPLES)
        assert abs(share - right) <= 4 * noise


def test_noise_scale(probe, dense):
    parts = [dense.gradient(rows=slice(i, i + 6), scale=4.0) for i in range(0, 24, 6)]
    expected = diagnostics.noise_scale(parts, 6)
    found = probe.noise()
    assert found.variance == pytest.approx(expected.variance, rel=RTOL)
    assert found.gradient_square == pytest.approx(
        expected.gradient_square, rel=RTOL, abs=1e-6
    )


def kronecker(block):
    """`A (x) G` for a row-major W, which is the kernel followed by the bias."""
    A, G = (keras.ops.convert_to_numpy(f).astype(float) for f in block.factors)
    return np.kron(A, G)


def test_quadratic_form_of_the_approximation(model, probe, dense):
    F = dense.fisher()
    blocks = [kronecker(b) for b in model.optimizer.blocks]
    approximate = np.zeros_like(F)
    start = 0
    for block in blocks:
        end = start + len(block)
        approximate[start:end, start:end] = block
        start = end
    # The products themselves, and the errors along the two directions.
    rng = np.random.default_rng(0)
    v = rng.normal(size=len(F))
    nested = kso.vectors.unflatten(
        keras.ops.convert_to_tensor(v, "float32"),
        [w.shape for w in model.trainable_variables],
    )
    ours = kso.vectors.flatten(model.optimizer.curvature.multiply(nested), "float32")
    np.testing.assert_allclose(
        keras.ops.convert_to_numpy(ours), approximate @ v, atol=RTOL
    )
    errors = probe.approximation_errors(model.optimizer)
    update = np.concatenate(
        [
            np.ravel(keras.ops.convert_to_numpy(d)).astype(float)
            for d in model.optimizer.previous
        ]
    )
    for name, v in (("update", update), ("gradient", dense.gradient())):
        expected = (v @ approximate @ v) / (v @ F @ v) - 1
        assert abs(expected) > 1e-3
        assert errors[name] == pytest.approx(expected, rel=1e-3, abs=1e-4), name
    random = np.random.default_rng(0)
    draws = [
        np.concatenate([random.normal(size=w.shape).ravel() for w in model.weights])
        for _ in range(4)
    ]
    expected = np.mean([(v @ approximate @ v) / (v @ F @ v) - 1 for v in draws])
    assert errors["random"] == pytest.approx(expected, rel=1e-3, abs=1e-4)


def test_layers(model):
    gamma = float(keras.ops.convert_to_numpy(model.optimizer.gamma))
    for layer, block, l2 in zip(
        diagnostics.layers(model.optimizer),
        model.optimizer.blocks,
        (0.0, PENALTY),
        strict=True,
    ):
        A, G = (keras.ops.convert_to_numpy(f).astype(float) for f in block.factors)
        pi = oracle.trace_norm_pi(A, G)
        root = np.sqrt(gamma**2 + 2 * l2)
        assert layer.pi == pytest.approx(pi, rel=RTOL)
        assert [f.name for f in layer.factors] == ["A", "G"]
        for factor, F, damping in zip(
            layer.factors, (A, G), (pi * root, root / pi), strict=True
        ):
            e = np.linalg.eigvalsh(F)
            np.testing.assert_allclose(factor.eigenvalues, e, atol=1e-6)
            np.testing.assert_allclose(factor.damping, damping, rtol=RTOL)
            damped = np.linalg.inv(F + damping * np.eye(len(F)))
            assert factor.condition == pytest.approx(np.linalg.cond(damped), rel=1e-3)
            np.testing.assert_allclose(
                factor.inverse, damped, rtol=0, atol=RTOL * abs(damped).max()
            )


def test_gains(model, probe, dense):
    g = dense.gradient()
    found = diagnostics.gains(model.optimizer, probe.gradient())
    pieces = oracle.split(g, dense.layers)
    for (name, gain), block, V in zip(
        found.items(), model.optimizer.blocks, pieces, strict=True
    ):
        A, G = (keras.ops.convert_to_numpy(f).astype(float) for f in block.inverses[:2])
        expected = np.linalg.norm(A @ V @ G) / np.linalg.norm(V)
        assert gain == pytest.approx(expected, rel=RTOL), name
    assert list(found) == ["hidden", "logits"]


def test_probe_follows_the_weights(model, probe):
    """The same object after a step; then back, and it says the same as before."""
    before = probe.gauss_newton().top
    saved = [np.array(keras.ops.convert_to_numpy(v)) for v in model.trainable_variables]
    for v in model.trainable_variables:
        v.assign(2.0 * v)
    assert abs(probe.gauss_newton().top - before).max() > 0.01 * before.max()
    for v, value in zip(model.trainable_variables, saved, strict=True):
        v.assign(value)
    np.testing.assert_allclose(probe.gauss_newton().top, before, rtol=1e-5)


def test_a_batch_of_one_example_is_refused(model):
    with pytest.raises(ValueError, match="at least two"):
        diagnostics.NetworkProbe(model, DATA.x[:1], DATA.classes[:1])
