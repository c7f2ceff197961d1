"""Losses that return one number for a batch, or one for many outputs."""

import keras
import numpy as np
import problems
import pytest
from keras import layers, ops

import keras_secondorder as kso

N, D = 40, 3  # more outputs in the batch than a dense block has
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, 2)).astype("float32")
Y = np.eye(D, dtype="float32")[RNG.integers(0, D, N)]
STEPS = RNG.normal(size=(4, 10, 2)).astype("float32")
CLASSES = np.eye(D, dtype="float32")[RNG.integers(0, D, (4, 10))]
EACH = keras.losses.CategoricalCrossentropy(from_logits=True)


def of_positions(y, z):
    return ops.categorical_crossentropy(y, z, from_logits=True)


def of_batch(y, z):
    return ops.mean(of_positions(y, z))


def of_examples(y, z):
    return ops.mean(of_positions(y, z), axis=-1)


def dense(matrix, x, y, loss, *flags):
    model = keras.Sequential([keras.Input(x.shape[1:]), layers.Dense(D)])
    model.set_weights([w + 0.1 * np.arange(w.size).reshape(w.shape) for w in WEIGHTS])
    model.compile(loss=loss)
    operator = matrix(model, x, y, *flags)
    return [ops.convert_to_numpy(operator.to_dense()), operator]


WEIGHTS = [np.zeros((2, D)), np.zeros(D)]


@pytest.mark.parametrize("rows", [8, N])  # one block of all outputs; one for each row
def test_one_number_has_the_curvature_of_its_rows_r10(rows):
    x, y = X[:rows], Y[:rows]
    right, _ = dense(kso.curvature.gauss_newton, x, y, EACH)
    ours, operator = dense(kso.curvature.gauss_newton, x, y, of_batch)
    np.testing.assert_allclose(ours, right, atol=1e-5)
    # From the square root, which on TensorFlow takes some time for each column.
    if rows == 8:
        diagonal = operator.diagonal(exact=True)
        diagonal = ops.convert_to_numpy(diagonal)
        np.testing.assert_allclose(diagonal, np.diag(right), atol=1e-5)


def test_one_number_for_many_steps_has_their_curvature_r17():
    right, _ = dense(kso.curvature.gauss_newton, STEPS, CLASSES, EACH)
    ours, _ = dense(kso.curvature.gauss_newton, STEPS, CLASSES, of_examples)
    np.testing.assert_allclose(ours, right, atol=1e-5)


@pytest.mark.parametrize("centered", [False, True])
def test_one_number_has_the_gradients_of_its_examples_r10(centered):
    right, _ = dense(kso.curvature.empirical_fisher, X, Y, EACH, None, centered)
    ours, _ = dense(kso.curvature.empirical_fisher, X, Y, of_batch, None, centered)
    np.testing.assert_allclose(ours, right, atol=1e-5)


@pytest.mark.parametrize("loss", [of_positions, "mae", "huber", "kl_divergence"])
def test_no_fisher_matrix_without_a_likelihood_or_targets(loss):
    """The Hessian at targets of zero would be another matrix, or zero."""
    model = keras.Sequential([keras.Input((2,)), layers.Dense(D)])
    optimizer = kso.NaturalGradient(metric_data=X)
    model.compile(optimizer, loss)
    with pytest.raises(ValueError, match="not known as a negative log-likelihood"):
        kso.curvature.fisher(model, X)
    with pytest.raises(Exception, match="not known as a negative log-likelihood"):
        model.fit(X, Y, verbose=0)


def test_weights_of_zero_have_no_covariance():
    zeros = np.zeros(N, "float32")
    ours, _ = dense(kso.curvature.empirical_fisher, X, Y, EACH, zeros, True)
    np.testing.assert_array_equal(ours, 0.0)


@pytest.mark.parametrize(
    "optimizer",
    [kso.HessianFree, kso.NaturalGradient, kso.KrylovSubspaceDescent, kso.KFAC],
)
@pytest.mark.filterwarnings("ignore:The loss '.*' is not convex")
def test_a_batch_with_nan_is_skipped_with_a_loss_without_distribution_r4(optimizer):
    model = keras.Sequential([keras.Input((2,)), layers.Dense(D)])
    model.compile(optimizer(), "huber")
    logs = [model.train_on_batch(x, Y, return_dict=True) for x in (X * np.nan, X, X)]
    assert int(logs[-1]["skipped_steps"]) == 1
    assert np.isfinite(logs[-1]["loss"])


def test_values_of_one_column_are_those_of_the_examples():
    def column(y, z):
        return ops.mean(ops.square(z - y), axis=-1, keepdims=True)

    right, _ = dense(kso.curvature.gauss_newton, X, Y, "mse")
    ours, _ = dense(kso.curvature.gauss_newton, X, Y, column)
    np.testing.assert_allclose(ours, right, atol=1e-5)


@pytest.mark.filterwarnings("ignore:The loss:UserWarning")
def test_one_value_for_a_pair_of_examples_is_refused():
    def pairs(y, z):
        return ops.sum(ops.square(z[0::2] - z[1::2]), axis=-1)

    with pytest.raises(ValueError, match="one value an example or"):
        dense(kso.curvature.gauss_newton, X, Y, pairs)


@pytest.mark.parametrize("matrix", ["gauss_newton", "fisher", "empirical_fisher"])
def test_a_model_without_a_loss_has_the_hessian_only(matrix):
    model = keras.Sequential([keras.Input((2,)), layers.Dense(D)])
    model.compile(optimizer="sgd")
    with pytest.raises(ValueError, match="compiled without one"):
        getattr(kso.curvature, matrix)(model, X, Y)


def test_a_compute_loss_of_the_model_s_own_is_said_not_to_be_seen():
    class Ten(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(D)

        def call(self, x):
            return self.dense(x)

        def compute_loss(self, *args, **kwargs):
            return 10.0 * super().compute_loss(*args, **kwargs)

    model = Ten()
    model(X)
    model.compile(loss="mse")
    with pytest.warns(UserWarning, match="Ten defines its own `compute_loss`"):
        G = kso.curvature.gauss_newton(model, X, Y)
    H = kso.curvature.hessian(model, X, Y)
    ratio = float(H.trace(None)) / float(G.trace(None))
    np.testing.assert_allclose(ratio, 10.0, rtol=1e-4)
    with pytest.warns(UserWarning, match="Ten defines its own `compute_loss`"):
        model.compile(optimizer=kso.KFAC(), loss="mse")


@pytest.mark.parametrize("kind", ["uint8", "int64", "bool"])
def test_labels_reach_a_loss_of_the_user_s_as_floats(kind):
    """As Keras hands them over: 2 y - 1 of a uint8 would wrap around."""

    def logistic(y, z):
        return ops.mean(ops.softplus(-(2 * y - 1) * z), axis=-1)

    for matrix in (kso.curvature.gauss_newton, kso.curvature.empirical_fisher):
        right, _ = dense(matrix, X, Y, logistic)
        ours, _ = dense(matrix, X, Y.astype(kind), logistic)
        np.testing.assert_allclose(ours, right, atol=1e-6)


def test_arrays_reach_a_loss_of_the_user_s_as_tensors():
    model = keras.Sequential([keras.Input((2,)), layers.Dense(D)])
    model.compile(kso.KFAC(), lambda y, z: ops.mean((y - z) ** 2, -1))
    before = model.evaluate(X, Y, verbose=0)
    for _ in range(5):
        model.train_on_batch(X, Y.astype("uint8"))
    assert model.evaluate(X, Y, verbose=0) < before


def test_masks_leave_the_weights_as_they_are():
    """On PyTorch, Keras multiplies weights by a mask in place."""
    tokens = np.array([[1, 2, 0], [2, 2, 1], [1, 0, 0], [0, 0, 0]])
    weight = np.arange(1.0, 13.0, dtype="float32").reshape(4, 3)
    embedding = layers.Embedding(3, 2, mask_zero=True)
    model = keras.Sequential([keras.Input((3,)), embedding, layers.Dense(D)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(kso.KFAC(), loss, weighted_metrics=["accuracy"])
    tensors = [ops.convert_to_tensor(t) for t in (tokens, tokens, weight)]
    for name in ("hessian", "gauss_newton", "empirical_fisher"):
        matrix = getattr(kso.curvature, name)
        right = matrix(model, tokens, tokens, weight).to_dense()
        ours = matrix(model, *tensors)
        for _ in range(2):
            np.testing.assert_allclose(*map(as_array, (ours.to_dense(), right)), 1e-5)
    np.testing.assert_array_equal(as_array(tensors[-1]), weight)
    model.fit(tokens, tokens, sample_weight=weight, verbose=0)


def as_array(tensor):
    return np.array(ops.convert_to_numpy(tensor))


class Wrapper(dict):
    """What Keras may make of a dict of losses, which is no pytree."""


@pytest.mark.parametrize("reductions", [("sum", "sum"), (None, None), ("sum", "mean")])
def test_a_part_of_the_batch_estimates_the_whole(reductions):
    """Every row is there four times, so that a quarter of them is exact."""
    rows = np.repeat(RNG.normal(size=(64, 2)).astype("float32"), 4, axis=0)
    inputs = keras.Input((2,))
    heads = {name: layers.Dense(2, name=name)(inputs) for name in "ab"}
    model = keras.Model(inputs, heads)
    MSE = keras.losses.MeanSquaredError
    model.compile(loss=dict(zip("ab", map(MSE, reductions), strict=True)))
    model.loss = Wrapper(model.loss)
    weights = np.repeat(np.arange(64, dtype="float32"), 4)
    for weight in (None, weights, {"a": weights, "b": 2 * weights}):
        y = {"a": rows, "b": 3 * rows}
        whole = problems.objective_of(model, rows, y, weight)
        values = [
            as_array(o.value(whole.parameters)) for o in (whole, whole.part(0.25))
        ]
        np.testing.assert_allclose(values[1], values[0], rtol=1e-5)
