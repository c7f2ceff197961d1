"""Where `A (x) G` is no approximation, it must be the true matrix.

One example; one linear layer with a squared loss; a deep linear network with a squared
loss; positions that are independent of one another behind one linear layer. The true
matrix is the dense Gauss-Newton matrix, or Keras's own Hessian.
"""

import keras
import numpy as np
import oracle
import problems
import pytest
from keras import ops

from keras_secondorder import autodiff
from keras_secondorder.likelihoods import fisher_gram

# Sums of some dozen float32 products, compared with the largest entry.
RTOL = 1e-5
BATCH = problems.classification().batches()[0]
WEIGHTS = BATCH.sample_weight / len(BATCH.x)


def close(ours, right, rtol=RTOL):
    np.testing.assert_allclose(ours, right, rtol=0, atol=rtol * np.abs(right).max())


def diagonal_blocks(layers, matrix):
    edges = np.cumsum([0, *(layer.W.size for layer in layers)])
    return [matrix[i:j, i:j] for i, j in zip(edges, edges[1:], strict=False)]


def compare_blocks(model, kind, x, y, sample_weight, weights):
    factors = problems.statistics_of(model, x, y, sample_weight)
    layers = problems.oracle_layers(model)
    right = diagonal_blocks(layers, oracle.fisher(layers, kind, x, weights))
    for (A, G), block in zip(factors, right, strict=True):
        close(np.kron(A, G), block)


@pytest.mark.parametrize("row", [0, 3])
def test_one_example(row):
    """For one example the block is exactly a a^T (x) G, behind any layers."""
    model = problems.classifier("softmax")
    model.compile(optimizer="sgd", loss=problems.LOSSES["softmax"])
    one = BATCH.rows(slice(row, row + 1))
    compare_blocks(model, "ce", one.x, one.one_hot, None, np.ones(1))


def test_non_square_layer_r11():
    """R11: Dense(3 -> 5) with a cross-entropy, one example: a swap would show."""
    model = problems.sequential([problems.dense(5)], inputs=(3,))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer="sgd", loss=loss)
    x, y = BATCH.x[:1, :3] + 1.0, np.array([4])
    compare_blocks(model, "ce_logits", x, y, None, np.ones(1))
    ((A, G),) = problems.statistics_of(model, x, y)
    assert A.shape == (4, 4) and G.shape == (5, 5)


@pytest.mark.parametrize("bias", [True, False])
def test_one_linear_layer_with_a_squared_loss(bias):
    model = problems.sequential([problems.dense(4, use_bias=bias)])
    model.compile(optimizer="sgd", loss="mse")
    y = BATCH.x[:, :4]
    compare_blocks(model, "mse", BATCH.x, y, BATCH.sample_weight, WEIGHTS)


def test_deep_linear_network_with_a_squared_loss():
    """G does not depend on the example, so the diagonal blocks are exact."""
    units = (5, 4, 2)
    model = problems.sequential([problems.dense(u) for u in units])
    model.compile(optimizer="sgd", loss="mse")
    y = BATCH.x[:, :2]
    compare_blocks(model, "mse", BATCH.x, y, BATCH.sample_weight, WEIGHTS)


# --- positions that share weights --------------------------------------------------

N, T, FEATURES, UNITS = 4, 3, 5, 2
SEQUENCE = np.random.default_rng(3).normal(size=(N, T, FEATURES)).astype("float32")
TARGETS = SEQUENCE[:, :, :UNITS] ** 2
POSITION_WEIGHTS = np.array([[1, 0, 2], [0, 0, 0], [1, 1, 1], [3, 1, 0.5]], "float32")


def sequence_model(kind, activation=None, loss="mse"):
    layer = problems.dense(UNITS, activation)
    if kind == "time distributed":
        layer = keras.layers.TimeDistributed(layer)
    model = problems.sequential([layer], inputs=(T, FEATURES))
    model.compile(optimizer="sgd", loss=loss)
    return model


@pytest.mark.parametrize("weights", [None, "(N, 1)", "(N, T)"])
@pytest.mark.parametrize("kind", ["dense", "time distributed"])
def test_independent_positions_with_a_squared_loss_r14(kind, weights):
    """R14: A (x) G is the matrix of the same rows, one by one, in a plain Dense."""
    sample_weight = {
        None: None,
        "(N, 1)": POSITION_WEIGHTS[:, :1],
        "(N, T)": POSITION_WEIGHTS,
    }[weights]
    model = sequence_model(kind)
    ((A, G),) = problems.statistics_of(model, SEQUENCE, TARGETS, sample_weight)
    kernel, bias = (ops.convert_to_numpy(v) for v in model.trainable_variables)
    layers = [oracle.Layer(np.vstack([kernel, bias]).astype(float))]
    w = np.ones((N, T))
    if sample_weight is not None:
        w = w * sample_weight.reshape(N, -1)
    rows = SEQUENCE.reshape(N * T, FEATURES)
    right = oracle.fisher(layers, "mse", rows, w.ravel() / (N * T))
    close(np.kron(A, G), right)


@pytest.mark.parametrize("fisher", ["exact", "sampled", "empirical"])
def test_time_distributed_is_dense_r14(fisher):
    """R14: also where A (x) G is an approximation."""
    ours, right = (
        problems.statistics_of(
            sequence_model(kind, "sigmoid", "binary_crossentropy"),
            SEQUENCE,
            (TARGETS > 0.5).astype("float32"),
            POSITION_WEIGHTS,
            fisher,
        )
        for kind in ("time distributed", "dense")
    )
    for a, b in zip(ours[0], right[0], strict=True):
        close(a, b)


def summed_model():
    """A Dense layer on (N, T, d), below a sum over the positions."""
    inputs = keras.Input((T, FEATURES))
    hidden = problems.dense(UNITS)(inputs)
    model = keras.Model(inputs, ops.sum(hidden, axis=1))
    problems.fill(model)
    model.compile(optimizer="sgd", loss="mse")
    return model


def test_shared_positions_of_one_example_add_up():
    """Dense on (N, T, d) below a sum over T: A is a mean, G a sum over positions."""
    model, y = summed_model(), TARGETS.sum(1)
    ((A, G),) = problems.statistics_of(model, SEQUENCE, y, POSITION_WEIGHTS[:, 0])
    rows = np.concatenate([SEQUENCE, np.ones((N, T, 1))], axis=-1)
    w = POSITION_WEIGHTS[:, 0] / N
    close(A, np.einsum("n,nti,ntj->ij", w / w.sum() / T, rows, rows))
    close(G, T * w.sum() * 2 / UNITS * np.eye(UNITS))


def test_reduced_positions_are_exact_below_a_sum():
    """ "reduce" below a sum over the positions, where "expand" is an approximation."""
    model, y = summed_model(), TARGETS.sum(1)
    reduced, expanded = (
        problems.statistics_of(model, SEQUENCE, y, weight_sharing=sharing)
        for sharing in ("reduce", "expand")
    )
    rows = np.concatenate([SEQUENCE, np.ones((N, T, 1))], axis=-1).sum(1)
    right = np.kron(rows.T @ rows / N, 2 / UNITS * np.eye(UNITS))
    close(np.kron(*reduced[0]), right)
    off = np.abs(np.kron(*expanded[0]) - right).max()
    assert off > 0.1 * np.abs(right).max()


def test_calls_of_one_layer_are_positions_r14():
    """R14: a layer called on two inputs is the same layer on both of them at once."""
    layer = problems.dense(UNITS)
    a, b = keras.Input((FEATURES,)), keras.Input((FEATURES,))
    twice = keras.Model([a, b], ops.stack([layer(a), layer(b)], axis=1))
    problems.fill(twice)
    x = keras.Input((2, FEATURES))
    once = keras.Model(x, layer(x))
    results = []
    for model, inputs in (
        (twice, [SEQUENCE[:, 0], SEQUENCE[:, 1]]),
        (once, SEQUENCE[:, :2]),
    ):
        model.compile(optimizer="sgd", loss="mse")
        results.append(problems.statistics_of(model, inputs, TARGETS[:, :2])[0])
    for ours, right in zip(*results, strict=True):
        close(ours, right)


# --- the exact matrix that the quadratic model uses (R10) --------------------------

HEADS = {
    "mse": (None, keras.losses.MeanSquaredError, {}, BATCH.x[:, :3]),
    "bce on logits": (
        None, keras.losses.BinaryCrossentropy, {"from_logits": True}, BATCH.one_hot
    ),
    "bce": ("sigmoid", keras.losses.BinaryCrossentropy, {}, BATCH.one_hot),
    "ce on logits": (
        None, keras.losses.CategoricalCrossentropy, {"from_logits": True},
        BATCH.one_hot,
    ),
    "ce": ("softmax", keras.losses.CategoricalCrossentropy, {}, BATCH.one_hot),
    "sparse ce": (
        "softmax", keras.losses.SparseCategoricalCrossentropy, {}, BATCH.classes
    ),
    "smoothed ce": (
        "softmax", keras.losses.CategoricalCrossentropy, {"label_smoothing": 0.3},
        BATCH.one_hot,
    ),
    "poisson": (
        "exponential", keras.losses.Poisson, {},
        (BATCH.classes[:, None] + np.arange(3)).astype("float32"),
    ),
    "log-cosh": (None, keras.losses.LogCosh, {}, BATCH.x[:, :3]),
}  # fmt: skip
# Every head with the default reduction, and every reduction with one of them.
COMBINATIONS = [(head, "sum_over_batch_size") for head in HEADS] + [
    (head, reduction)
    for reduction in ("sum", "mean_with_sample_weight", None)
    for head in ("mse", "ce")
]


@pytest.mark.parametrize(("head", "reduction"), COMBINATIONS)
def test_gauss_newton_matrix_is_the_hessian_of_a_linear_model_r10(head, reduction):
    """R10: for one layer in natural parameters the two are the same matrix.

    The right side is Keras's own loss, differentiated twice along a vector.
    """
    activation, loss, options, y = HEADS[head]
    model = problems.sequential([problems.dense(3, activation)], inputs=(2,))
    loss = loss(reduction=reduction, **options)
    model.compile(optimizer="sgd", loss=loss, loss_weights=0.7)
    x = BATCH.x[:, :2]
    with autodiff.no_grad():
        objective = problems.objective_of(model, x, y, BATCH.sample_weight)
        weights = objective.linearize().aux.weights
        network = objective.linearize_outputs(ops.convert_to_tensor(x), taps=False)
        outputs, push = network.outputs, network.push
        curves = objective.curves(outputs, weights)
        rng = np.random.default_rng(0)
        shapes = [tuple(p.shape) for p in objective.parameters]
        basis = np.eye(9, dtype="float32")
        v = rng.normal(size=9).astype("float32")
        vectors = [as_parameters(u, shapes) for u in (*basis, v)]
        gram = fisher_gram(curves, outputs, [push(u) for u in vectors])
        x, y, w = (ops.convert_to_tensor(a) for a in (x, y, BATCH.sample_weight))

        def value(parameters):
            y_pred, _ = model.stateless_call(parameters, [], x)
            return 0.7 * ops.sum(loss(y, y_pred, w))

        product = autodiff.hessian_product(value, objective.parameters, vectors[-1])
    right = np.concatenate([ops.convert_to_numpy(p).ravel() for p in product])
    close(ops.convert_to_numpy(gram)[:-1, -1], right)


def as_parameters(vector, shapes):
    kernel, bias = vector[:6], vector[6:]
    return [
        ops.convert_to_tensor(part.reshape(shape))
        for part, shape in zip((kernel, bias), shapes, strict=True)
    ]
