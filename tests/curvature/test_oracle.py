"""The oracle itself, against differences in float64: the one thing that it rests on."""

import numpy as np
import oracle
import problems
import pytest

# Central differences of step 1e-5 lose about 1e-10 to truncation and to rounding.
RTOL = 1e-7
STEP = 1e-5
BATCH = problems.classification().batches()[0]
X, W = BATCH.x.astype(float), BATCH.sample_weight / 8.0


def network(last):
    rng = np.random.default_rng(0)
    return [
        oracle.Layer(rng.normal(size=(7, 4)), "tanh", True, 0.02, 0.01),
        oracle.Layer(rng.normal(size=(4, 5)), "sigmoid", False),
        oracle.Layer(0.5 * rng.normal(size=(6, 3)), last, True, 0.03),
    ]


KINDS = {
    "mse": "linear",
    "bce_logits": "linear",
    "bce": "sigmoid",
    "ce_logits": "linear",
    "ce": "softmax",
    "poisson": "exponential",
}
TARGETS = {"mse": X[:, :3], "poisson": BATCH.one_hot * 2.0}


def differences(f, size):
    """`df / dtheta`, the last axis."""
    steps = STEP * np.eye(size)
    return np.stack([(f(d) - f(-d)) / (2 * STEP) for d in steps], axis=-1)


@pytest.mark.parametrize("kind", list(KINDS))
def test_gradient(kind):
    layers, y = network(KINDS[kind]), TARGETS.get(kind, BATCH.one_hot)
    right = differences(
        lambda d: oracle.objective(oracle.moved(layers, d), kind, X, y, W),
        oracle.flat(layers).size,
    )
    np.testing.assert_allclose(
        oracle.gradient(layers, kind, X, y, W), right, rtol=0, atol=RTOL
    )


@pytest.mark.parametrize("last", ["linear", "softmax", "sigmoid", "exponential"])
def test_jacobian(last):
    layers = network(last)
    right = differences(
        lambda d: oracle.run(oracle.moved(layers, d), X).z, oracle.flat(layers).size
    )
    np.testing.assert_allclose(oracle.jacobian(layers, X), right, rtol=0, atol=RTOL)


@pytest.mark.parametrize("kind", ["mse", "bce_logits", "ce_logits"])
def test_output_fisher_is_the_hessian_in_natural_parameters(kind):
    z = np.random.default_rng(1).normal(size=(8, 3))
    y = TARGETS.get(kind, BATCH.one_hot)
    right = differences(lambda d: oracle.loss_gradient(kind, z + d, y), 3)
    np.testing.assert_allclose(oracle.output_fisher(kind, z), right, atol=RTOL)


@pytest.mark.parametrize(
    ("natural", "kind", "link"),
    [("bce_logits", "bce", "sigmoid"), ("ce_logits", "ce", "softmax")],
)
def test_output_fisher_of_probabilities_is_the_same_metric(natural, kind, link):
    s = np.random.default_rng(1).normal(size=(8, 3))
    J = oracle.activation_jacobian(link, s)
    F = oracle.output_fisher(kind, oracle.activate(link, s))
    np.testing.assert_allclose(
        J.swapaxes(1, 2) @ F @ J, oracle.output_fisher(natural, s), atol=1e-12
    )


def test_fisher_is_the_average_of_squared_scores():
    """Over all 8 targets of three independent bits, weighted by their probability."""
    layers = network("sigmoid")
    J, z = oracle.jacobian(layers, X), oracle.run(layers, X).z
    total = 0.0
    for bits in np.ndindex(2, 2, 2):
        y = np.broadcast_to(np.array(bits, float), z.shape)
        probability = np.prod(np.where(y == 1, z, 1 - z), axis=1)
        # The loss is a third of -log p; its curvature is a third of p's Fisher matrix.
        score = np.einsum("nk,nkp->np", 3 * oracle.loss_gradient("bce", z, y), J)
        total += np.einsum("n,np,nq->pq", W * probability / 3, score, score)
    np.testing.assert_allclose(oracle.fisher(layers, "bce", X, W), total, atol=1e-12)


def test_factors_of_one_example_are_its_block():
    layers, one = network("softmax"), X[:1]
    w = np.ones(1)
    F, start = oracle.fisher(layers, "ce", one, w), 0
    for layer, (A, G) in zip(layers, oracle.factors(layers, "ce", one, w), strict=True):
        end = start + layer.W.size
        np.testing.assert_allclose(np.kron(A, G), F[start:end, start:end], atol=1e-12)
        start = end
