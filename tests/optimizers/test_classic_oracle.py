"""Steps of the classic optimizers, against dense matrices and TONGA's own columns."""

from typing import NamedTuple

import keras
import numpy as np
import oracle
import oracle_steps
import problems
import pytest
from optimizers import oracle_classic

import keras_secondorder as kso

# Ten thousand times float32's rounding, for solves with a condition of about a hundred
# and the steps before.
STEP_RTOL = 1e-4
# The difference quotient of the acceleration divides float32's rounding by 0.1^2.
LOOSE = 2e-3
ROWS, STEPS = 12, 3


class Case(NamedTuple):
    ours: object
    theirs: type
    arguments: tuple = ()
    outputs: int = 3
    l2: float = 0.02
    rtol: float = STEP_RTOL


CASES = {
    "lm": Case(kso.LevenbergMarquardt, oracle_classic.LevenbergMarquardt, rtol=LOOSE),
    "lm, identity": Case(
        lambda: kso.LevenbergMarquardt(damping_matrix="identity", acceleration=False),
        oracle_classic.LevenbergMarquardt,
        (False, False),
    ),
    "lm, dual": Case(
        lambda: kso.LevenbergMarquardt(damping=0.3, form="dual", acceleration=False),
        oracle_classic.LevenbergMarquardt,
        (True, False, 0.3),
        l2=0.0,
    ),
    "newton, absolute": Case(kso.Newton, oracle_classic.Newton, ("absolute",)),
    "newton, shift": Case(
        lambda: kso.Newton(damping=0.1, negative_curvature="shift"),
        oracle_classic.Newton,
        ("shift", 0.1),
    ),
    "diagonal": Case(
        lambda: kso.DiagonalGaussNewton(0.3, 0.2),
        oracle_classic.DiagonalGaussNewton,
        (0.3, 0.2, False),
        outputs=1,
    ),
    "diagonal, empirical": Case(
        lambda: kso.DiagonalGaussNewton(0.3, 0.2, "empirical"),
        oracle_classic.DiagonalGaussNewton,
        (0.3, 0.2, True),
    ),
    "meta-descent": Case(
        lambda: kso.StochasticMetaDescent(1.0, 0.2, 2.0, 0.9),
        oracle_classic.StochasticMetaDescent,
        (0.2, 2.0, 0.9),
    ),
    "matrix momentum": Case(
        lambda: kso.MatrixMomentum(0.5, 0.1, epsilon=0.4),
        oracle_classic.MatrixMomentum,
        (0.5, 0.1, 0.4),
    ),
    "sgd-qn": Case(
        lambda: kso.SGDQN(0.5, 0.1, interval=2),
        oracle_classic.SGDQN,
        (0.5, 0.1, 2),
        # A secant over a step of float32 has few digits.
        rtol=LOOSE,
    ),
    "rprop": Case(lambda: kso.RProp(initial_step=0.1), oracle_classic.RProp, (0.1,)),
    "rates": Case(
        lambda: kso.AdaptiveRates(initial_rate=0.3),
        oracle_classic.AdaptiveRates,
        ("sign", 0.3),
    ),
    "rates, normalized": Case(
        lambda: kso.AdaptiveRates(rule="normalized", initial_rate=0.3),
        oracle_classic.AdaptiveRates,
        ("normalized", 0.3),
    ),
}


def network(outputs, l2=0.0):
    penalty = keras.regularizers.L2(l2) if l2 else None
    return problems.sequential(
        [
            problems.dense(4, "tanh", kernel_regularizer=penalty),
            problems.dense(outputs, kernel_regularizer=penalty),
        ],
        scale=0.4,
    )


def targets(batch, outputs):
    return batch.x[:, :outputs] ** 2


def batches(count):
    data = problems.classification(count * ROWS, seed=3)
    return [data.rows(slice(i * ROWS, (i + 1) * ROWS)) for i in range(count)]


def train(model, batch):
    """The update and the logs of one step; the outputs are those of the model."""
    before = problems.parameters(model)
    y = targets(batch, model.output_shape[-1])
    logs = model.train_on_batch(batch.x, y, batch.sample_weight, return_dict=True)
    return problems.parameters(model) - before, logs


@pytest.mark.parametrize("name", CASES)
def test_steps_equal_the_oracle(name):
    case = CASES[name]
    model = network(case.outputs, case.l2)
    layers = problems.oracle_layers(model)
    theirs = case.theirs(layers, "mse", *case.arguments)
    model.compile(optimizer=case.ours(), loss="mse")
    for batch in batches(STEPS):
        w = batch.sample_weight.astype(float) / ROWS
        expected = theirs.step(batch.x, targets(batch, case.outputs), w)
        update, logs = train(model, batch)
        error = np.linalg.norm(update - expected)
        assert error <= case.rtol * np.linalg.norm(expected)
        if "damping" in logs and not theirs.fixed:
            now = float(model.optimizer.damping_value)
            np.testing.assert_allclose(now, theirs.damping, rtol=LOOSE)


def test_epsilon_of_matrix_momentum_is_of_the_largest_eigenvalue():
    model = network(3)
    (batch,) = batches(1)
    w = batch.sample_weight.astype(float) / ROWS
    G = oracle_classic.gauss_newton(problems.oracle_layers(model), "mse", batch.x, w)
    model.compile(optimizer=kso.MatrixMomentum(damping=0.1), loss="mse")
    _, logs = train(model, batch)
    # Ten power iterations are below the eigenvalue, by little.
    top = np.linalg.eigvalsh(G)[-1]
    assert 0.95 * top <= 1 / float(logs["epsilon"]) - 0.1 <= (1 + 1e-4) * top


@pytest.mark.parametrize(("blocks", "centered"), [("unit", True), ("full", False)])
def test_tonga(blocks, centered):
    """Its columns are signed sums of gradients; the rest is a dense solve with them."""
    options = {"rank": 2, "interval": 2, "columns": 3, "decay": 0.9}
    optimizer = kso.TONGA(0.7, 0.5, blocks=blocks, centered=centered, **options)
    model = network(2)
    model.compile(optimizer=optimizer, loss="mse")
    before, parts = None, _blocks(model, blocks)
    for k, batch in enumerate(batches(4)):
        layers, y = problems.oracle_layers(model), targets(batch, 2)
        w = batch.sample_weight.astype(float) / ROWS
        g = oracle.gradient(layers, "mse", batch.x, y, w)
        update, logs = train(model, batch)
        X = np.array(keras.ops.convert_to_numpy(optimizer.X), float)

        # The new rows: sums of the gradients of examples under signs.
        rows, constant = oracle_steps.example_gradients(layers, "mse", batch.x, y)
        omega = w * constant
        eps = min(1 - 1 / (k + 1), 0.9)
        first = 2 + (k % 2) * 3
        new = X[first : first + 3] / np.sqrt((1 - eps) / 3)
        signs = np.linalg.lstsq((np.sqrt(omega)[:, None] * rows).T, new.T)[0].T
        seen = omega > 0  # a weight of zero hides a sign
        if centered:
            # What was taken out is along the roots of the weights.
            s = np.sqrt(omega / omega.sum())
            spread = [_without(s, v, seen) for v in signs]
            assert max(spread) < 1e-3
        else:
            np.testing.assert_allclose(abs(signs[:, seen]), 1.0, atol=1e-3)

        # The rows before: kept, or the largest of each block.
        if before is not None:
            old = np.delete(X, slice(first, first + 3), axis=0) / np.sqrt(eps)
            earlier = np.delete(before, slice(first, first + 3), axis=0)
            if k % 2 == 0:
                for part in parts:
                    kept = _largest(before[:, part], 2)
                    found = old[:, part].T @ old[:, part]
                    np.testing.assert_allclose(found, kept, atol=1e-5)
            else:
                np.testing.assert_allclose(old, earlier, atol=1e-6)
        before = X

        # The step: a dense solve with the covariance of each block.
        expected = np.zeros_like(g)
        for part in parts:
            C = X[:, part].T @ X[:, part] + 0.5 * np.eye(len(part))
            expected[part] = -np.linalg.solve(C, g[part])
        expected *= 0.7 * float(logs["step_length"])
        error = np.linalg.norm(update - expected)
        assert error <= STEP_RTOL * np.linalg.norm(expected)


def _without(s, v, seen):
    """How far `v + c s` is from signs, for the best `c`."""
    s, v = s[seen], v[seen]
    # v = r - s (s . r): for some c, all entries of v + c s are +-1.
    candidates = np.concatenate([(1 - v) / s, (-1 - v) / s])
    return min(np.abs(np.abs(v + c * s) - 1).max() for c in candidates)


def _largest(X, rank):
    values, vectors = np.linalg.eigh(X.T @ X)
    V = vectors[:, -rank:]
    return V @ np.diag(values[-rank:]) @ V.T


def _blocks(model, kind):
    """Indices of the parameters of each block."""
    numbers = np.arange(model.count_params())
    if kind == "full":
        return [numbers]
    parts, start = [], 0
    for v in model.trainable_variables:
        index = numbers[start : start + int(np.prod(v.shape))].reshape(v.shape)
        index = index.reshape(-1, v.shape[-1])
        parts += [index[:, j] for j in range(index.shape[1])]
        start += index.size
    return parts
