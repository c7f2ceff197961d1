"""Every layer wrapper: its contract, and its block against the dense matrix."""

import keras
import numpy as np
import oracle
import problems
import pytest
from capture import layers as kinds
from capture.dense_blocks import dense_factor, jacobian, numpy, positions_of
from keras import ops

from keras_secondorder import autodiff, vectors
from keras_secondorder.capture import plan_blocks, recording, wrapper_of
from keras_secondorder.curvature import KroneckerBlock, UnitwiseBlock
from keras_secondorder.curvature.factor import damped_inverses
from keras_secondorder.testing import check_layer_wrapper

# Sums of some dozen float32 products, compared with the largest entry.
RTOL = 2e-5


@pytest.mark.parametrize("name", list(kinds.CASES))
def test_contract(name):
    case = kinds.CASES[name]
    arguments = {"training": True} if "normal" in name and "batch" in name else {}
    check_layer_wrapper(case.layer(), case.inputs(), **arguments)


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("zeros", [False, True])
def test_masked_time_steps(backwards, zeros):
    """`Bidirectional` sets `zero_output_for_mask` on the layers inside it."""
    layer = keras.layers.LSTM(3, return_sequences=True, go_backwards=backwards)
    layer.zero_output_for_mask = zeros
    mask = np.array([[1, 1, 0, 1], [1, 1, 1, 1], [0, 1, 1, 0]], bool)
    inputs = kinds.RNG.normal(size=(3, 4, 2)).astype("float32")
    check_layer_wrapper(layer, inputs, mask=ops.convert_to_tensor(mask))


def test_dropout_inside_the_recurrence():
    layer = keras.layers.GRU(3, dropout=0.5, seed=0)
    inputs = kinds.RNG.normal(size=(3, 4, 2)).astype("float32")
    layer(inputs)
    # The masks are drawn from a seed that moves: give the three passes the same one.
    seed = layer.cell.seed_generator.state
    start = ops.convert_to_numpy(seed)
    wrapper, _ = wrapper_of(layer)
    values = vectors.values(layer.trainable_variables)

    def forward(values, tap):
        scope = list(zip(layer.trainable_variables, values, strict=True))
        with keras.StatelessScope([*scope, (seed, ops.convert_to_tensor(start))]):
            with recording([wrapper], tap) as seen:
                return [layer(ops.convert_to_tensor(inputs), training=True)], dict(seen)

    with autodiff.no_grad():
        linear = autodiff.vjp(forward, values)
        gradient, taps = linear.pullback_all([ops.ones_like(linear.outputs[0])])
    part, (kernel, _) = wrapper.parts[0], wrapper.split(gradient)[0]
    a = numpy(part.input_rows(linear.aux[0][0]))
    g = numpy(part.gradient_rows(taps[0, 0]))
    assert (a[..., :2] == 0).any()
    ours = np.einsum("nti,ntj->ij", a, g)[:2]
    np.testing.assert_allclose(ours, numpy(kernel), atol=1e-5)


REFUSED = {
    "reset_after=False": lambda: keras.layers.GRU(2, reset_after=False),
    "unrolled backwards": lambda: keras.layers.SimpleRNN(
        2, unroll=True, go_backwards=True, zero_output_for_mask=True
    ),
    "implementation=1": lambda: keras.layers.LSTM(2, recurrent_dropout=0.1),
    "runs the cell StackedRNNCells": lambda: keras.layers.RNN(
        [keras.layers.GRUCell(2), keras.layers.GRUCell(2)]
    ),
}


@pytest.mark.parametrize("reason", list(REFUSED))
def test_recurrent_layers_that_are_refused(reason):
    model = keras.Sequential([keras.Input((3, 2)), REFUSED[reason]()])
    found = {block.reason for block in plan_blocks(model)}
    assert len(found) == 1 and reason in found.pop()


def test_bias_over_positions_is_named():
    layer = keras.layers.EinsumDense("abc,cd->abd", (3, 4), bias_axes="bd")
    kernel, bias = plan_blocks(keras.Sequential([keras.Input((3, 2)), layer]))
    assert kernel.kind == "kronecker" and bias.kind == "diagonal"
    assert bias.reason == "a bias over the axes 'bd'"


GAMMA, ETA = 0.2, 0.01


@pytest.mark.parametrize(
    ("name", "memory"),
    [
        ("conv2d, groups", "split"),
        ("embedding", "full"),
        ("gru", "split"),
        ("separable conv1d", "diagonal"),
        ("layer normalization", "full"),
    ],
)
def test_preconditioning_solves_the_damped_system(name, memory):
    """`U = (A + pi gamma I)^-1 V (G + gamma / pi I)^-1` of every matrix, in full."""
    case, rng = kinds.CASES[name], np.random.default_rng(0)
    layer = case.layer()
    dtype = "int32" if case.vocabulary else None
    model = keras.Sequential([keras.Input(case.shape, dtype=dtype), layer])
    (plan,) = plan_blocks(model, factor_memory=0 if memory == "diagonal" else None)
    if memory == "split":
        halves = [[s._replace(blocks=2) if s.blocks == 1 and s.size > 2 else s
                   for s in pair] for pair in plan.sides]  # fmt: skip
        plan = plan._replace(sides=halves)
    unitwise = plan.kind == "unitwise"
    block = (UnitwiseBlock if unitwise else KroneckerBlock)(plan, problems.add_variable)
    flat = [pair[k] for k in range(len(plan.sides[0])) for pair in plan.sides]
    for factor, side in zip(block.factors, flat, strict=True):
        root = rng.normal(size=(*factor.shape[:-1], 2 * factor.shape[-1]))
        if side.blocks * side.width > side.size:  # the padding stays zero
            root[side.blocks - 1 :: side.blocks, side.size % side.width :] = 0.0
        factor.assign((root @ root.swapaxes(-1, -2)).astype("float32"))
    gamma = ops.convert_to_tensor(np.float32(GAMMA))
    factors = [ops.convert_to_tensor(f) for f in block.factors]
    inverses = damped_inverses(*block.systems(factors, gamma, ETA))
    shapes = [tuple(v.shape) for v in block.variables]
    V = [rng.normal(size=shape).astype("float32") for shape in shapes]
    U = block.precondition([ops.convert_to_tensor(v) for v in V], inverses, 0.0)
    assert [tuple(u.shape) for u in U] == shapes
    V, U = (np.concatenate([numpy(v).ravel() for v in values]) for values in (V, U))
    count, strength = len(block.sides), np.sqrt(GAMMA**2 + ETA)
    for i, matrices in enumerate(positions_of(block, block.variables)):
        for j, places in enumerate(matrices):
            dense = [
                dense_factor(numpy(block.factors[k * count + i]), side, j)
                for k, side in enumerate(block.sides[i])
            ]
            if unitwise:
                damped = dense[0] + strength**2 * np.eye(len(dense[0]))
            else:
                A, G = dense
                pi = oracle.trace_norm_pi(A, G)
                damped = np.kron(
                    A + pi * strength * np.eye(len(A)),
                    G + strength / pi * np.eye(len(G)),
                )
            right = np.linalg.solve(damped, V[places])
            atol = 1e-4 * np.abs(right).max()
            np.testing.assert_allclose(U[places], right, rtol=0, atol=atol)


EXACT = [name for name, case in kinds.CASES.items() if case.exact]


@pytest.mark.parametrize("name", EXACT)
def test_block_is_the_gauss_newton_matrix(name):
    """A squared loss on the outputs of the layer alone: the block is exact.

    The outputs then have the same curvature at every position and are independent, so
    that the sum over positions of `a a^T (x) G` is `A (x) G`.
    """
    case = kinds.CASES[name]
    x, layer = case.inputs(), case.layer()
    dtype = "int32" if case.vocabulary else None
    model = keras.Sequential([keras.Input(case.shape, dtype=dtype), layer])
    model.compile(optimizer="sgd", loss="mse")
    if isinstance(layer, keras.layers.BatchNormalization):
        layer.trainable = True
        layer.momentum = 0.0
        model(x, training=True)  # the statistics of the batch, as in training
    J = jacobian(layer, x)
    right = 2.0 / len(J) * J.T @ J
    (block,) = problems.blocks_of(model)
    y = np.zeros(layer(x).shape, "float32")
    (factors,) = problems.statistics_of(model, x, y)
    count = len(factors) // len(block.sides[0])
    for i, matrices in enumerate(positions_of(block, layer.trainable_variables)):
        sides = block.sides[i]
        for j, places in enumerate(matrices):
            ours = np.eye(1)
            for k, side in enumerate(sides):
                factor = dense_factor(factors[k * count + i], side, j)
                ours = np.kron(ours, factor)
            expected = right[np.ix_(places, places)]
            atol = RTOL * np.abs(right).max()
            np.testing.assert_allclose(ours, expected, rtol=0, atol=atol)
