"""The blocks: averages, damping, inverses, and how they are applied."""

import keras
import numpy as np
import oracle
import problems
import pytest
from keras import ops

import keras_secondorder as kso
from keras_secondorder import autodiff
from keras_secondorder.curvature import batch_factors
from keras_secondorder.curvature.factor import (
    damped_inverses,
    running_average,
    trace_norm_pi,
)

RNG = np.random.default_rng(0)
# float32 products with inverses at condition numbers up to 100.
RTOL = 1e-4


def tensor(array):
    return ops.convert_to_tensor(np.asarray(array, "float32"))


def numpy(x):
    return ops.convert_to_numpy(x).astype(float)


def close(ours, right, rtol=RTOL):
    np.testing.assert_allclose(ours, right, rtol=0, atol=rtol * np.abs(right).max())


def spd(size, scale=1.0):
    root = RNG.normal(size=(size, 2 * size))
    return scale * root @ root.T / (2 * size)


# --- averages and damping ----------------------------------------------------------


def test_running_average_starts_as_the_first_value_and_ends_at_its_decay():
    values = RNG.normal(size=(40, 3))
    ours = tensor(np.full(3, 1e6))  # whatever is there before
    right = np.zeros(3)
    for k, value in enumerate(values, start=1):
        ours = running_average(ours, tensor(value), tensor(k), 0.95)
        eps = min(1 - 1 / k, 0.95)
        right = eps * right + (1 - eps) * value
        if k == 20:  # up to here it is the plain mean
            np.testing.assert_allclose(right, values[:20].mean(0), rtol=1e-10)
    np.testing.assert_allclose(numpy(ours), right, rtol=1e-5, atol=1e-6)


def test_pi_is_the_ratio_of_mean_eigenvalues():
    A, G = spd(6, 3.0), spd(3, 0.01)
    right = np.sqrt((np.trace(A) / 6) / (np.trace(G) / 3))
    np.testing.assert_allclose(
        numpy(trace_norm_pi(tensor(A), tensor(G))), right, rtol=1e-5
    )


@pytest.mark.parametrize(("a", "g"), [(0.0, 1.0), (1.0, 0.0), (0.0, 0.0)])
def test_pi_is_finite_where_a_factor_vanishes_r2(a, g):
    """R2: a dead layer has G = 0."""
    pi = numpy(trace_norm_pi(tensor(a * np.eye(4)), tensor(g * np.eye(3))))
    assert np.isfinite(pi) and pi > 0


def test_pi_scales_with_the_factors():
    """Factors in other units give the damping in the same units."""
    A, G = tensor(spd(6)), tensor(spd(3))
    ratio = numpy(trace_norm_pi(16.0 * A, G)) / numpy(trace_norm_pi(A, G))
    np.testing.assert_allclose(ratio, 4.0, rtol=1e-5)


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_damped_inverse_at_any_scale(scale):
    matrix, damping = spd(7, scale), 0.3 * scale
    right = np.linalg.inv(matrix + damping * np.eye(7))
    close(numpy(damped_inverses([tensor(matrix)], [tensor(damping)])[0]), right)


def test_damped_inverse_of_a_singular_factor_r1():
    """R1: columns that are always zero; their directions have the damping alone."""
    matrix = spd(7)
    matrix[2], matrix[:, 2] = 0.0, 0.0
    inverse = numpy(damped_inverses([tensor(matrix)], [tensor(0.1)])[0])
    close(inverse, np.linalg.inv(matrix + 0.1 * np.eye(7)))
    np.testing.assert_allclose(inverse[2, 2], 10.0, rtol=1e-4)


def test_damping_below_rounding_is_raised_r3():
    """R3: a factor of rank one, undamped, has an inverse in float32 all the same."""
    v = RNG.normal(size=(7, 1))
    inverse = numpy(damped_inverses([tensor(v @ v.T)], [tensor(0.0)])[0])
    assert np.isfinite(inverse).all()
    # Never below the identity over the damping that rounding asks for, a thousandfold.
    assert np.linalg.eigvalsh(inverse)[-1] < 1e10


# --- Kronecker blocks --------------------------------------------------------------


@pytest.fixture(scope="module", params=[True, False], ids=["bias", "no bias"])
def block(request):
    """A block of Dense(3 -> 5) with factors of full rank."""
    layer = problems.dense(5, use_bias=request.param)
    (block,) = problems.blocks_of(problems.sequential([layer], inputs=(3,)))
    block.A.assign(tensor(spd(3 + request.param, 2.0)))
    block.G.assign(tensor(spd(5, 0.3)))
    return block


GAMMA, ETA = 0.2, 0.01


def inverses_of(block):
    factors = [tensor(block.A), tensor(block.G)]
    return damped_inverses(factors, block.dampings(*factors, tensor(GAMMA), ETA))


def gradient_of(block):
    return [tensor(RNG.normal(size=v.shape)) for v in block.variables]


def as_matrix(values):
    return np.vstack([numpy(v).reshape(-1, 5) for v in values])


def test_inverses_equal_the_oracle(block):
    A, G = numpy(block.A), numpy(block.G)
    right = oracle.damped_inverses(A, G, np.sqrt(GAMMA**2 + ETA))
    for ours, expected in zip(inverses_of(block), right, strict=True):
        close(numpy(ours), expected)


def test_precondition_solves_the_kronecker_system_r11(block):
    """R11: (A' (x) G') vec(U) = vec(V) row by row, with A' 4 x 4 and G' 5 x 5."""
    A, G = numpy(block.A), numpy(block.G)
    gamma = np.sqrt(GAMMA**2 + ETA)
    pi = oracle.trace_norm_pi(A, G)
    dense = np.kron(A + pi * gamma * np.eye(len(A)), G + gamma / pi * np.eye(len(G)))
    V = gradient_of(block)
    right = np.linalg.solve(dense, as_matrix(V).ravel())
    U = block.precondition(V, inverses_of(block), tensor(0.0))
    assert [u.shape for u in U] == [v.shape for v in V]
    close(as_matrix(U).ravel(), right)


def test_preconditioning_twice_is_the_same_r5(block):
    """R5: applying the inverse changes neither the factors nor the next result."""
    V = gradient_of(block)
    before = [numpy(f) for f in block.factors]
    results = []
    for _ in range(2):
        inverses = inverses_of(block)
        for _ in range(2):
            results.append(as_matrix(block.precondition(V, inverses, tensor(0.1))))
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])
    for factor, old in zip(block.factors, before, strict=True):
        np.testing.assert_array_equal(numpy(factor), old)


def test_low_rank_application_equals_the_direct_one(block):
    d_in = block.wrapper.d_in
    a, g = RNG.normal(size=(6, d_in)), RNG.normal(size=(6, 5))
    V = block.wrapper.from_matrix(tensor(a.T @ g))
    inverses = inverses_of(block)
    direct = block.precondition(V, inverses, tensor(0.0))
    thin = block.precondition(V, inverses, tensor(0.0), (tensor(a), tensor(g)))
    close(as_matrix(thin), as_matrix(direct))


def test_rows_pay_below_a_number_of_rows():
    (wide,) = problems.blocks_of(
        problems.sequential([problems.dense(40)], inputs=(40,))
    )
    assert wide.rows_pay(4)
    assert not wide.rows_pay(400)
    assert not wide.rows_pay(None)


def test_low_rank_and_direct_give_the_same_step():
    """Through KFAC: 40 x 41 x 40, on 4 rows, is applied from the rows."""
    x = RNG.normal(size=(4, 40)).astype("float32")
    updates = []
    for penalty in (None, 1e-12):  # an L1 penalty's gradient has to go the direct way
        layer = problems.dense(
            40, kernel_regularizer=penalty and keras.regularizers.L1(penalty)
        )
        model = problems.sequential([layer], inputs=(40,), scale=0.1)
        model.compile(
            optimizer=kso.KFAC(fisher="exact", statistics_fraction=1.0), loss="mse"
        )
        before = problems.parameters(model)
        model.train_on_batch(x, x[:, ::-1].copy())
        updates.append(problems.parameters(model) - before)
    assert np.linalg.norm(updates[0]) > 1e-3
    close(updates[0], updates[1])


# --- diagonal and identity blocks --------------------------------------------------

REPEATS = 200
# Each entry's own standard error is measured; 5 of them, on 11 entries, happen by
# chance once in 150,000 runs, and the seed is fixed.
STANDARD_ERRORS = 5.0


@pytest.mark.parametrize("fisher", ["sampled", "exact"])
def test_diagonal_block_has_the_fisher_diagonal_as_expectation(fisher):
    """Sampled also where the statistics of the other blocks are exact."""
    model = problems.sequential(
        [problems.UnknownDense(2, "tanh"), problems.UnknownDense(1, "sigmoid")],
        inputs=(2,),
    )
    model.compile(optimizer="sgd", loss="binary_crossentropy")
    data = problems.classification().batches()[0]
    x, y, w = data.x[:, :2], data.column % 2, data.sample_weight
    blocks = problems.blocks_of(model, on_unsupported="diagonal")
    assert all(b.wrapper is None and b.factors for b in blocks)
    draws = []
    with autodiff.no_grad():
        objective = problems.objective_of(model, x, y, w, blocks)
        linear = objective.linearize(taps=True)
        for k in range(REPEATS):
            counter = ops.convert_to_tensor(k, dtype="int32")
            factors = batch_factors(objective, linear, blocks, fisher, 1.0, 0, counter)
            draws.append(np.concatenate([numpy(D).ravel() for (D,) in factors]))
    draws = np.stack(draws)
    layers = problems.oracle_layers(model)
    right = np.diag(oracle.fisher(layers, "bce", x, w / len(x)))
    error = draws.std(0) / np.sqrt(REPEATS)
    assert np.all(error < 0.3 * right)  # the comparison below can fail
    assert np.all(np.abs(draws.mean(0) - right) <= STANDARD_ERRORS * error)


def test_diagonal_and_gradient_blocks_apply():
    model = problems.sequential([problems.UnknownDense(2)], inputs=(3,))
    for kind in ("diagonal", "gradient"):
        blocks = problems.blocks_of(model, on_unsupported=kind)
        V = [RNG.normal(size=b.variables[0].shape) for b in blocks]
        for block, v in zip(blocks, V, strict=True):
            D = np.abs(v) + 1.0
            if kind == "diagonal":
                block.D.assign(tensor(D))
            (U,) = block.precondition([tensor(v)], [], tensor(0.5))
            right = v / (D + 0.5) if kind == "diagonal" else v
            close(numpy(U), right)
