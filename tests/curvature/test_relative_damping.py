"""Damping in units of each block's mean eigenvalue, and steps relative to weights."""

import keras
import numpy as np
import problems
import pytest
from keras import ops

import keras_secondorder as kso
from keras_secondorder import vectors
from keras_secondorder.solvers.bounds import reference_loss
from keras_secondorder.solvers.step_rules import Proposal

RNG = np.random.default_rng(0)
LAMBDA, ETA, RTOL = 0.3, 0.01, 1e-4
layers = keras.layers


def numpy(x):
    return ops.convert_to_numpy(x).astype(float)


def tensors(*arrays):
    return [ops.convert_to_tensor(np.asarray(a, "float32")) for a in arrays]


def filled(model):
    """A model's blocks with relative damping and random positive statistics."""
    blocks = problems.blocks_of(model)
    for block in blocks:
        block.relative = True
        for factor in block.factors:
            root = RNG.normal(size=factor.shape)
            if block.wrapper is not None:  # one matrix, or a stack of them
                root = root @ np.swapaxes(root, -1, -2)
            factor.assign(np.abs(root) if block.wrapper is None else root)
    return blocks


def mean_eigenvalues(block):
    """The mean eigenvalue of the block of each affine map, by whole matrices."""
    factors = [numpy(f) for f in block.factors]
    if block.wrapper is None:
        return [factors[0].mean()]
    if len(block.sides[0]) == 1:
        return [np.mean([np.linalg.eigvalsh(F).mean() for F in factors[0]])]
    count = len(block.parts)
    return [
        np.linalg.eigvalsh(np.kron(factors[i], factors[count + i])).mean()
        for i in range(count)
    ]


@pytest.mark.parametrize(
    "layer",
    [
        lambda: layers.Dense(3),
        lambda: layers.SimpleRNN(3),  # two affine maps
        layers.BatchNormalization,
        lambda: problems.UnknownDense(2),
    ],
)
def test_damping_is_a_share_of_the_mean_eigenvalue(layer):
    built = layer()
    inputs = (5, 4) if isinstance(built, layers.RNN) else (4,)
    for block in filled(problems.sequential([built], inputs=inputs)):
        means = mean_eigenvalues(block)
        ours = float(block.damping(LAMBDA))
        np.testing.assert_allclose(ours, LAMBDA * np.mean(means), rtol=RTOL)
        if block.wrapper is None:
            continue
        moments = vectors.values(block.factors)
        dampings = block.dampings_of(moments, LAMBDA**0.5, ETA)
        if len(means) == len(dampings):  # unitwise
            products = [float(dampings[0])]
        else:  # pi gamma times gamma / pi
            count = len(means)
            products = [float(dampings[i] * dampings[count + i]) for i in range(count)]
        expected = LAMBDA * np.mean(means) + ETA  # one for all maps
        np.testing.assert_allclose(products, expected, rtol=RTOL)


def test_a_block_without_curvature_is_damped_by_lambda():
    (block,) = problems.blocks_of(problems.sequential([problems.dense(2)]))
    block.relative = True
    assert float(block.damping(LAMBDA)) == pytest.approx(LAMBDA)
    A, G = block.dampings_of(vectors.values(block.factors), LAMBDA**0.5, 0.0)
    assert float(A * G) == pytest.approx(LAMBDA, rel=1e-5)


def shares_of(weights, U, places, iterations, rate=0.5, loss=1.0, **options):
    rule = kso.TrustRegionStep(relative_step=kso.RelativeStep(0.01, 4), **options)
    U, weights = tensors(*U), tensors(*weights)
    rest = (ops.convert_to_tensor(iterations, dtype="int32"), weights, places, None)
    step = rule.step(Proposal(U, U, U, loss, 2.0, rate, *rest))
    return [float(share) for share in step.shares], float(step.alpha)


def test_a_layers_step_is_a_share_of_its_weights():
    """Of kernel and bias together, falling with the number of steps and the loss."""
    kernel, bias = RNG.normal(size=(4, 3)), np.zeros(3)
    U = [10.0 * RNG.normal(size=(4, 3)), RNG.normal(size=3), np.full(3, 1e-4)]
    places = [[0, 1], [2]]
    for iterations, loss, bound in (
        (0, 2.0, 0.01),
        (3, 5.0, 0.01),
        (3, -0.125, 0.005),
        (15, 2.0, 0.005),
        (15, 0.125, 0.0025),
    ):
        options = {"loss": loss, "norm_constraint": None}
        shares, _ = shares_of([kernel, bias, bias], U, places, iterations, **options)
        assert shares[0] == shares[1]
        assert shares[2] == 1.0  # short enough
        step = 0.5 * shares[0] * np.concatenate([u.ravel() for u in U[:2]])
        weights = np.concatenate([kernel.ravel(), bias])
        np.testing.assert_allclose(
            np.linalg.norm(step), bound * np.linalg.norm(weights), rtol=1e-5
        )


@pytest.mark.parametrize(
    "before, loss, step, constant, expected",
    [
        (0.0, 2.0, 0, 3.0, 3.0),
        (0.0, -4.0, 0, 3.0, 4.0),
        (5.0, 1.0, 3, 3.0, 3.0),
        (2.0, 1.0, 9, 3.0, 2.0),
        (5.0, 1.0, 10, 3.0, 5.0),
        (0.0, 2.0, 0, np.nan, 2.0),
        (0.0, 2.0, 0, np.inf, 2.0),
    ],
)
def test_reference_loss(before, loss, step, constant, expected):
    before, loss, constant = tensors(before, loss, constant)
    k = ops.convert_to_tensor(step, dtype="int32")
    assert float(reference_loss(before, loss, k, lambda: constant)) == expected


def test_weights_of_zero_leave_zero_and_the_radius_counts_what_is_left():
    U, c = [np.full((2, 2), 3.0)], 1e-8
    options = {"loss": 2.0, "norm_constraint": c}
    (share,), nu = shares_of([np.zeros((2, 2))], U, [[0]], 0, **options)
    assert 0.5 * share * 3.0 == pytest.approx(0.01 * 0.03, rel=1e-5)
    assert nu**2 * 0.5**2 * share**2 * np.sum(U[0] ** 2) == pytest.approx(c, rel=1e-4)


def test_a_rate_of_zero_stores_nothing_for_the_momentum():
    for constraint in (None, 0.1):
        _, alpha = shares_of(
            [np.ones((2, 2))],
            [np.ones((2, 2))],
            [[0]],
            0,
            rate=0.0,
            norm_constraint=constraint,
        )
        assert alpha == 0.0
