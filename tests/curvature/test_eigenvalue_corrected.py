"""Exact damping and corrected eigenvalues, for every kind of block, in full."""

import keras
import numpy as np
import oracle
import problems
import pytest
from capture import layers as kinds
from capture.dense_blocks import dense_factor, jacobian, positions_of
from keras import ops
from oracle_steps import example_gradients

from keras_secondorder import autodiff
from keras_secondorder.capture import plan_blocks
from keras_secondorder.curvature import EigenvalueCorrected, KroneckerBlock
from keras_secondorder.curvature.eigenbasis import eigenbases
from keras_secondorder.curvature.eigenvalue_corrected import (
    CorrectedBlock,
    FactoredCorrectedBlock,
)
from keras_secondorder.curvature.exact_tikhonov import EigenbasisBlock
from keras_secondorder.curvature.factor import damped_inverses

RNG = np.random.default_rng(0)
# Sums of some dozen float32 products, and rotations, next to the largest entry.
RTOL = 2e-5

APPLIED = [
    ("dense", "full"),
    ("conv2d, groups", "split"),
    ("separable conv1d", "diagonal"),
    ("embedding", "full"),
    ("gru", "split"),
]
MEASURED = [
    *APPLIED,
    ("dense, time steps", "full"),
    ("conv1d, same strided", "full"),
    ("depthwise conv1d", "full"),
    ("separable conv1d", "full"),
    ("einsum, groups", "full"),
    ("lstm", "full"),
]


def tensor(array):
    return ops.convert_to_tensor(np.asarray(array, "float32"))


def numpy(x):
    return ops.convert_to_numpy(x).astype(float)


def close(ours, right, rtol=RTOL):
    np.testing.assert_allclose(ours, right, rtol=0, atol=rtol * np.abs(right).max())


def model_of(layer, case):
    dtype = "int32" if case.vocabulary else None
    model = keras.Sequential([keras.Input(case.shape, dtype=dtype), layer])
    model.compile(optimizer="sgd", loss="mse")
    return model


def block_of(model, memory, cls):
    (plan,) = plan_blocks(model, factor_memory=0 if memory == "diagonal" else None)
    if memory == "split":
        halves = [[s._replace(blocks=2) if s.blocks == 1 and s.size > 2 else s
                   for s in pair] for pair in plan.sides]  # fmt: skip
        plan = plan._replace(sides=halves)
    return cls(plan, problems.add_variable)


def factors_and_sides(block):
    """`(variable, side)` of all A, then of all G."""
    sides = [pair[k] for k in range(2) for pair in block.sides]
    return list(zip(block.factors, sides, strict=False))


def maps(block, variables):
    """`(places of its entries, part, index in the stack)` of every matrix."""
    for i, matrices in enumerate(positions_of(block, variables)):
        for j, places in enumerate(matrices):
            yield places, i, j


def kron_of(block, arrays, i, j):
    """The Kronecker product of the matrices number j of map i."""
    count = len(block.sides)
    left, right = (
        dense_factor(arrays[k * count + i], side, j)
        for k, side in enumerate(block.sides[i])
    )
    return np.kron(left, right)


# --- exact Tikhonov damping ---------------------------------------------------------

DAMPING = 0.3


@pytest.mark.parametrize(("name", "memory"), APPLIED)
def test_exact_damping_solves_the_damped_system(name, memory):
    """`vec U = (A (x) G + lambda I)^-1 vec V` of every matrix."""
    case = kinds.CASES[name]
    block = block_of(model_of(case.layer(), case), memory, EigenbasisBlock)
    fill(block)
    inverses = block.decomposed(eigenbases([tensor(f) for f in block.factors]))
    assert [tuple(v.shape) for v in block.inverses] == [i.shape for i in inverses]
    V = [RNG.normal(size=v.shape) for v in block.variables]
    U = block.precondition([tensor(v) for v in V], inverses, tensor(DAMPING))
    assert [u.shape for u in U] == [v.shape for v in V]
    V, U = (np.concatenate([np.ravel(v) for v in values])
            for values in (V, map(numpy, U)))  # fmt: skip
    factors = [numpy(f) for f in block.factors]
    for places, i, j in maps(block, block.variables):
        F = kron_of(block, factors, i, j)
        right = np.linalg.solve(F + DAMPING * np.eye(len(F)), V[places])
        close(U[places], right, rtol=1e-5)


def fill(block):
    """Factors of full rank."""
    for factor, side in factors_and_sides(block):
        root = RNG.normal(size=(*factor.shape[:-1], 2 * factor.shape[-1]))
        if side.blocks * side.width > side.size:  # the padding stays zero
            root[side.blocks - 1 :: side.blocks, side.size % side.width :] = 0.0
        factor.assign((root @ root.swapaxes(-1, -2) / factor.shape[-1]).astype("f"))


@pytest.mark.parametrize(("name", "memory"), APPLIED)
def test_cross_terms_are_those_of_damped_factors(name, memory):
    """With `S = d_A d_G^T` the two ways to factored damping are one."""
    case = kinds.CASES[name]
    model = model_of(case.layer(), case)
    block = block_of(model, memory, FactoredCorrectedBlock)
    plain = block_of(model, memory, KroneckerBlock)
    fill(block)
    factors = [tensor(f) for f in block.factors[: 2 * len(block.parts)]]
    V = [tensor(RNG.normal(size=v.shape)) for v in block.variables]
    gamma, eta = tensor(0.5), 0.05
    inverses = block.decomposed(eigenbases(factors))
    ours = block.precondition(V, inverses, gamma**2 + eta)
    right = plain.precondition(
        V, damped_inverses(*plain.systems(factors, gamma, eta)), None
    )
    for u, v in zip(ours, right, strict=True):
        close(numpy(u), numpy(v))


@pytest.fixture(scope="module")
def dense_block():
    """A singular block of Dense(3 -> 5), decomposed."""
    model = problems.sequential([problems.dense(5)], inputs=(3,))
    block = block_of(model, "full", EigenbasisBlock)
    a, g = RNG.normal(size=(4, 2)), RNG.normal(size=(5, 3))
    block.A.assign((a @ a.T).astype("float32"))
    block.G.assign((g @ g.T).astype("float32"))
    return block, block.decomposed(eigenbases([tensor(f) for f in block.factors]))


def test_exact_damping_from_rows(dense_block):
    block, inverses = dense_block
    a, g = RNG.normal(size=(6, 4)), RNG.normal(size=(6, 5))
    V = block.wrapper.from_matrix(tensor(a.T @ g))
    direct = block.precondition(V, inverses, tensor(DAMPING))
    thin = block.precondition(V, inverses, tensor(DAMPING), (tensor(a), tensor(g)))
    for ours, right in zip(thin, direct, strict=True):
        close(numpy(ours), numpy(right))


def test_damping_below_rounding_is_raised_r3(dense_block):
    """R3: what a singular block says of its null space is rounding."""
    block, inverses = dense_block
    V = [tensor(np.ones(v.shape)) for v in block.variables]
    largest = np.max(numpy(inverses[-1]))
    for u in block.precondition(V, inverses, tensor(0.0)):
        assert np.abs(numpy(u)).max() < np.sqrt(20) / (1e-7 * largest)


# --- corrected eigenvalues ----------------------------------------------------------


def random_basis(side):
    """Orthogonal blocks, of which the last leaves its padding alone."""
    basis = np.zeros((side.stack * side.blocks, side.width, side.width))
    for i in range(len(basis)):
        size = side.width
        if i % side.blocks == side.blocks - 1:
            size -= side.blocks * side.width - side.size
        basis[i] = np.eye(side.width)
        if side.width > 1:
            basis[i, :size, :size] = np.linalg.qr(RNG.normal(size=(size, size)))[0]
    return basis.reshape(side.shape)


def compare_with_the_fisher_diagonal(block, model, x, F):
    """`S = diag(W^T F W)`, `W = U_A (x) U_G`, in any orthogonal basis."""
    sides = [side for _, side in factors_and_sides(block)]
    bases = [random_basis(side) for side in sides]
    for variable, basis in zip(block.inverses, bases, strict=False):
        variable.assign(basis.astype("float32"))
    y = np.zeros(model(x).shape, "float32")
    (factors,) = problems.factors_of([block], model, x, y)
    count = len(block.sides)
    for places, i, j in maps(block, model.trainable_variables):
        W = kron_of(block, bases, i, j)
        right = np.diag(W.T @ F[np.ix_(places, places)] @ W)
        a, g = block.sides[i]
        S = factors[2 * count + i].reshape(a.stack, a.blocks * a.width, -1)
        assert not S[:, a.size :].any() and not S[:, :, g.size :].any()
        close(S[j, : a.size, : g.size].ravel(), right)


@pytest.mark.parametrize(("name", "memory"), MEASURED)
def test_moments_are_the_diagonal_of_the_fisher_matrix(name, memory):
    """Whatever the layer: with several positions, of sums over them."""
    case = kinds.CASES[name]
    x, layer = case.inputs(), case.layer()
    model = model_of(layer, case)
    J = jacobian(layer, x)
    F = 2.0 / len(J) * J.T @ J  # of a squared loss on the layer's outputs
    block = block_of(model, memory, CorrectedBlock)
    compare_with_the_fisher_diagonal(block, model, x, F)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_moments_of_a_layer_that_is_called_twice(sharing):
    inputs = keras.Input((4,))
    shared = problems.dense(3, "tanh")
    outputs = keras.layers.Concatenate()([shared(inputs), shared(inputs * inputs)])
    model = keras.Model(inputs, keras.layers.Dense(2, trainable=False)(outputs))
    problems.fill(model)
    model.compile(optimizer="sgd", loss="mse")
    x = RNG.normal(size=(3, 4)).astype("float32")
    J = jacobian(model, x)
    (plan,) = plan_blocks(model)
    block = CorrectedBlock(plan, problems.add_variable, sharing)
    compare_with_the_fisher_diagonal(block, model, x, 2.0 / len(J) * J.T @ J)


BATCH = problems.classification().batches()[0]


def after_two_updates(model, y, fisher):
    """The curvature after two updates by one batch, of which the second counts."""
    curvature = EigenvalueCorrected(model, problems.add_variable)
    with autodiff.no_grad():
        objective = problems.objective_of(
            model, BATCH.x, y, BATCH.sample_weight, curvature.blocks
        )
        linear = objective.linearize(taps=True)
        settings = {"fisher": fisher, "fraction": 1.0, "seed": 0, "counter": tensor(0)}
        for _ in range(2):
            due = ops.convert_to_tensor(True)
            curvature.update(due, 0.0, objective, linear, **settings)
            curvature.keep_inverses(curvature.damped_inverses(tensor(0.1)))
    return curvature.blocks


def block_matrices(layers, y, fisher):
    """The oracle's Fisher blocks of the layers."""
    w = BATCH.sample_weight / len(BATCH.x)
    if fisher == "exact":
        F = oracle.fisher(layers, "ce_logits", BATCH.x, w)
    else:
        rows, constant = example_gradients(layers, "ce_logits", BATCH.x, y)
        F = np.einsum("n,np,nq->pq", w * constant, rows, rows)
    ends = np.cumsum([0, *(layer.W.size for layer in layers)])
    return [F[a:b, a:b] for a, b in zip(ends, ends[1:], strict=False)]


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_never_farther_from_the_fisher_matrix_than_kfac(fisher):
    """George et al. (2018), section 3.1: in the Frobenius norm; and strictly here."""
    model = problems.classifier()
    model.compile(optimizer="sgd", loss=problems.LOSSES["logits"])
    blocks = after_two_updates(model, BATCH.one_hot, fisher)
    right = block_matrices(problems.oracle_layers(model), BATCH.one_hot, fisher)
    for block, F in zip(blocks, right, strict=True):
        A, G, _ = (numpy(f) for f in block.factors)
        U_A, U_G, S = (numpy(f) for f in block.inverses)
        W = np.kron(U_A, U_G)
        close(S.ravel(), np.diag(W.T @ F @ W))
        corrected, plain = (
            np.linalg.norm(F - approximation)
            for approximation in (W * S.ravel() @ W.T, np.kron(A, G))
        )
        assert corrected < 0.99 * plain


def test_nothing_is_corrected_where_kfac_is_exact():
    """A linear layer with a squared loss: the moments are products of eigenvalues."""
    model = problems.sequential([problems.dense(3)])
    model.compile(optimizer="sgd", loss="mse")
    (block,) = after_two_updates(model, BATCH.x[:, :3], "exact")
    A, G, S = (numpy(f) for f in block.factors)
    W = np.kron(*(numpy(U) for U in block.inverses[:2]))
    close(W * S.ravel() @ W.T, np.kron(A, G))
