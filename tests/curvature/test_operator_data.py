"""Operators of a network: data, weights, labels, draws, precision and memory."""

import functools
import gc
import weakref

import brute_force
import keras
import numpy as np
import oracle
import problems
import pytest
from brute_force import array
from keras import ops

from keras_secondorder.curvature import (
    empirical_fisher,
    fisher,
    gauss_newton,
    hessian,
    network,
)

# Sums of some dozen float32 products, compared with the largest entry.
RTOL = 1e-5
DATA = problems.classification()
X, Y, W = DATA.x, DATA.classes, DATA.sample_weight
LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
BACKEND = keras.backend.backend()
LABELLED = {
    "hessian": hessian,
    "gauss_newton": gauss_newton,
    "empirical": empirical_fisher,
}


def close(ours, right, rtol=RTOL):
    ours, right = (array(t) if ops.is_tensor(t) else t for t in (ours, right))
    np.testing.assert_allclose(ours, right, rtol=0, atol=rtol * np.abs(right).max())


def classifier(head="logits", loss=LOGITS, **options):
    model = problems.classifier(head)
    model.compile(loss=loss, **options)
    return model


@functools.cache
def reference(name, weights=None):
    """The matrix of the shared model on the shared data, and the model."""
    w = None if weights is None else np.asarray(weights, "float32")
    model = classifier()
    made = (
        fisher(model, X, Y, w) if name == "fisher" else LABELLED[name](model, X, Y, w)
    )
    return made.to_dense(), model


# --- forms of data -----------------------------------------------------------------


class Sequence(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, i):
        batch = DATA.batches()[i]
        return batch.x, batch.classes, batch.sample_weight


def tf_dataset():
    tf = pytest.importorskip("tensorflow")
    return tf.data.Dataset.from_tensor_slices((X, Y, W)).batch(8)


def loader():
    data = pytest.importorskip("torch.utils.data")
    torch = pytest.importorskip("torch")
    tensors = data.TensorDataset(*map(torch.as_tensor, (X, Y, W)))
    return data.DataLoader(tensors, batch_size=8)


def batches():
    return [(b.x, b.classes, b.sample_weight) for b in DATA.batches()]


SOURCES = {
    "list": batches,
    "PyDataset": Sequence,
    "tf.data": tf_dataset,
    "DataLoader": loader,
}


@pytest.mark.parametrize("source", SOURCES)
def test_batches_of_unequal_size_are_the_whole(source):
    right, model = reference("gauss_newton", tuple(W))
    operator = gauss_newton(model, SOURCES[source]())
    for v in np.random.default_rng(0).normal(size=(2, right.shape[0])):
        close(operator @ v, array(right) @ v)  # also a second time
    if source == "list":  # the same products, one for each column
        close(operator.to_dense(), right)
        close(operator.diagonal(), np.diag(array(right)))


@pytest.mark.parametrize("name", [*LABELLED, "fisher"])
def test_every_operator_takes_batches(name):
    right, model = reference(name, tuple(W))
    make = fisher if name == "fisher" else LABELLED[name]
    close(make(model, batches()).to_dense(), right)


def test_batches_of_inputs_alone():
    right, model = reference("fisher")
    close(fisher(model, [b.x for b in DATA.batches()]).to_dense(), right)
    close(fisher(model, [X]).to_dense(), right)


def test_arrays_are_read_once():
    """A change to the arrays, or to what the model is compiled with, comes too late."""
    right, model = reference("hessian")
    x, y = X.copy(), Y.copy()
    H = hessian(model, x, y)
    x[:], y[:] = 7.0, 0
    model.compile(loss=keras.losses.CategoricalHinge())
    model.layers[0].trainable = False
    close(H.to_dense(), right)
    model.layers[0].trainable = True
    model.compile(loss=LOGITS)


def test_another_loss_between_batches_is_refused():
    model = classifier()
    A = gauss_newton(model, batches())
    model.compile(loss="sparse_categorical_crossentropy")
    with pytest.raises(ValueError, match="another loss.*Make the operator again"):
        A @ np.ones(A.shape[0])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda m: hessian(m, iter(batches())), "list_iterator, which can be read"),
        (lambda m: hessian(m, (b for b in batches())), "generator, which can be read"),
        (lambda m: hessian(m, []), "no batches"),
        (lambda m: hessian(m, batches(), sample_weight=W), "Pass batches \\(x, y, sam"),
        (lambda m: hessian(m, X[:0], Y[:0]), "a batch without any"),
        (lambda m: empirical_fisher(m, [(X[:0], Y[:0])]), "without any"),
        (lambda m: hessian(m, None, Y), "no inputs"),
        (lambda m: hessian(m, X.tolist(), Y), "arrays with an axis of rows"),
        (lambda m: hessian(m, X), "needs targets"),
        (lambda m: gauss_newton(m, X), "needs targets"),
        (lambda m: empirical_fisher(m, [(X,)]), "needs targets"),
        (lambda m: hessian(problems.classifier(), X, Y), "not compiled"),
    ],
)
def test_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        wrong(classifier())


def test_a_loss_that_is_not_convex_is_projected_with_a_warning():
    model = classifier(loss=keras.losses.CosineSimilarity())
    with pytest.warns(UserWarning, match="is not convex in the outputs"):
        G = array(gauss_newton(model, X, DATA.one_hot).to_dense())
    assert np.linalg.eigvalsh(G).min() > -1e-6 * np.abs(G).max()


def test_a_frozen_model_is_refused():
    model = classifier()
    model.trainable = False
    with pytest.raises(ValueError, match="no trainable variables"):
        hessian(model, X, Y)


# --- weights, labels, targets (R9, R17, R19) ---------------------------------------


@pytest.mark.parametrize("name", [*LABELLED, "fisher"])
def test_sample_weights_r19(name):
    """Weights 0, 1, 3 are rows left out, once, and three times; and scale with c."""
    weights = np.resize(np.array([0.0, 1.0, 3.0], "float32"), len(X))
    repeated = np.repeat(np.arange(len(X)), weights.astype(int))
    model = classifier()
    make = LABELLED.get(name, fisher)
    ours = array(make(model, X, Y, weights).to_dense())
    rows = array(make(model, X[repeated], Y[repeated]).to_dense())
    close(ours, rows * len(repeated) / len(X))
    changed, labels = X.copy(), Y.copy()
    changed[weights == 0], labels[weights == 0] = 5.0, 0
    close(make(model, changed, labels, weights).to_dense(), ours)
    close(make(model, X, Y, 2.5 * weights).to_dense(), 2.5 * ours)
    twice = np.r_[X, X], np.r_[Y, Y], np.r_[weights, weights]
    close(make(model, *twice).to_dense(), ours)


def test_a_tuple_that_may_mean_two_things_is_refused():
    _, model = reference("fisher")
    for make in (fisher, hessian):
        with pytest.raises(ValueError, match="one batch .x, y. or as several batches"):
            make(model, (X, Y))


@pytest.mark.parametrize("data", [(X, Y[:-3], None), (X, Y, W[:-3])])
def test_rows_that_do_not_match_are_refused(data):
    _, model = reference("fisher")
    with pytest.raises(ValueError, match="as many rows as each other.* ..23, 6"):
        gauss_newton(model, *data)


def test_labels_matter_to_the_empirical_fisher_alone_r9():
    right, model = reference("fisher")
    flipped = (Y + 1) % 3
    close(fisher(model, [(X, flipped)]).to_dense(), right)
    sampled = [fisher(model, [(X, y)], samples=2).to_dense() for y in (Y, flipped)]
    np.testing.assert_array_equal(*map(array, sampled))
    E = array(reference("empirical")[0])
    other = array(empirical_fisher(model, X, flipped).to_dense())
    assert np.abs(E - other).max() > 0.1 * np.abs(E).max()


def test_forms_of_labels_r17():
    right, model = reference("hessian")
    close(hessian(model, X, DATA.column).to_dense(), right)
    model = classifier(loss=problems.LOSSES["logits"])
    close(hessian(model, X, DATA.one_hot).to_dense(), right)


@pytest.mark.parametrize("head", ["softmax", "softmax layer"])
def test_heads_of_one_distribution_agree(head):
    right, _ = reference("gauss_newton")
    model = classifier(head, problems.LOSSES[head])
    close(gauss_newton(model, X, DATA.one_hot).to_dense(), right)
    close(
        empirical_fisher(model, X, DATA.one_hot).to_dense(), reference("empirical")[0]
    )


@pytest.mark.parametrize("head", ["logits", "softmax", "softmax layer"])
def test_saturated_outputs_r8(head):
    """Logits of +-100: the right matrix, and no NaN."""
    model = problems.sequential(
        [problems.dense(3, "softmax" if head == "softmax" else None)]
        + [keras.layers.Softmax()] * (head == "softmax layer"),
        inputs=(1,),
    )
    model.layers[0].kernel.assign([[100.0, -100.0, 0.0]])
    model.layers[0].bias.assign([0.0, 0.0, 0.0])
    model.compile(loss=problems.LOSSES[head])
    x = np.array([[1.0], [-1.0], [0.01]], "float32")  # the last is not saturated
    (layer,) = problems.oracle_layers(model)
    layers = [layer._replace(activation="linear")]
    right = oracle.fisher(layers, "ce_logits", x, np.ones(3) / 3)
    close(gauss_newton(model, x, DATA.one_hot[:3]).to_dense(), right)
    close(fisher(model, x).to_dense(), right)
    sampled = array(fisher(model, x, samples=2).to_dense())
    E = array(empirical_fisher(model, x, DATA.one_hot[:3]).to_dense())
    assert np.isfinite(sampled).all() and np.isfinite(E).all()


# --- draws -------------------------------------------------------------------------

SAMPLES, COPIES = 4, 100


def test_sampled_fisher_in_expectation():
    """The mean of 400 draws: 4 on each of 100 copies of a batch.

    The variance of one draw is summed over all targets. Copies that shared their draws
    would be off by ten standard errors.
    """
    model = problems.sequential([problems.dense(3)], inputs=(2,))
    model.compile(loss=LOGITS)
    x, (layer,) = X[:8, :2], problems.oracle_layers(model)
    J, z = oracle.jacobian([layer], x), oracle.run([layer], x).z
    p = oracle.softmax(z)
    s = np.einsum("ny,nyk,nkp->nyp", np.ones((8, 3)), p[:, None] - np.eye(3), J)
    s = s / np.sqrt(8)
    right = np.einsum("ny,nyp,nyq->npq", p, s, s)
    variance = (p * (s**2).sum(-1) ** 2).sum() - (right**2).sum()
    error = np.sqrt(variance / (SAMPLES * COPIES))
    ours = fisher(model, [(x,)] * COPIES, samples=SAMPLES)
    made = array(ours.to_dense())
    assert 0.2 * error < np.linalg.norm(made - right.sum(0)) < 4 * error
    np.testing.assert_array_equal(array(ours.to_dense()), made)
    other = array(fisher(model, [(x,)] * 2, samples=SAMPLES, seed=1).to_dense())
    assert np.abs(other - made).max() > RTOL * np.abs(made).max()


# --- diagonals of large operators --------------------------------------------------


@pytest.mark.parametrize("name", ["gauss_newton", "fisher", "sampled", "empirical"])
def test_diagonal_from_a_square_root(name, monkeypatch):
    """What takes over beyond 512 rows, here from the first."""
    l2 = {"kernel_regularizer": keras.regularizers.L2(0.05)}
    model = problems.sequential([problems.dense(3, "tanh", **l2), problems.dense(3)])
    model.compile(loss=LOGITS)
    make = {
        **{k: lambda d, k=k: LABELLED[k](model, d) for k in LABELLED},
        "fisher": lambda d: fisher(model, d),
        "sampled": lambda d: fisher(model, d, samples=3),
    }[name]
    operator = make(batches())
    right = np.diag(array(operator.to_dense()))
    monkeypatch.setattr(network, "MAX_EXACT_PRODUCTS", 31)  # 8 rows of 3, fewer than P
    assert operator.shape[0] > 31
    close(operator.diagonal(), right)
    close(operator.diagonal(exact=True), right)
    rough = array(operator.diagonal(samples=200))
    # Each term has a relative error below sqrt(2), and 200 are averaged.
    assert np.all(np.abs(rough - right) <= 5 * np.sqrt(2 / 200) * right + 1e-6)
    assert not np.allclose(rough, right, rtol=1e-3)


# --- float64 -----------------------------------------------------------------------


@pytest.fixture
def double():
    if BACKEND == "torch":
        pytest.skip("keras.ops.matmul computes in float32 on torch")
    before = keras.config.floatx(), keras.config.dtype_policy()
    if BACKEND == "jax":
        import jax

        jax.config.update("jax_enable_x64", True)
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx(before[0])
    keras.config.set_dtype_policy(before[1])
    if BACKEND == "jax":
        jax.config.update("jax_enable_x64", False)


# Float64 sums; the differences of the oracle's gradient are good to 1e-11.
DOUBLE_RTOL = 1e-9


def test_float64(double):
    # A loss made before would have kept to float32.
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # Not tanh, which JAX computes to 1e-7 in float64 as well.
    model = problems.sequential([problems.dense(5, "sigmoid"), problems.dense(3)])
    model.compile(loss=loss)
    layers = problems.oracle_layers(model)
    x, y, w = X.astype(float), Y, W.astype(float)
    right = oracle.fisher(layers, "ce_logits", x, w / len(x))
    operators = gauss_newton(model, x, y, w), fisher(model, x, y, w)
    for operator in operators:
        assert operator.dtype == "float64"
        close(operator.to_dense(), right, DOUBLE_RTOL)

    def gradient(theta):
        moved = oracle.moved(layers, theta - oracle.flat(layers))
        return oracle.gradient(moved, "ce_logits", x, DATA.one_hot, w / len(x))

    right = brute_force.differences(gradient, oracle.flat(layers))
    close(hessian(model, x, y, w).to_dense(), right, DOUBLE_RTOL)


# --- memory (R23) ------------------------------------------------------------------


@pytest.mark.parametrize("make", [hessian, gauss_newton])
def test_an_operator_is_freed_with_its_last_reference(make):
    """Its linearisation is as large as a training step's: no cycle may keep it."""
    operator = make(classifier(), X, Y)
    operator @ np.ones(operator.shape[0])
    alive = weakref.ref(operator)
    gc.disable()
    try:
        del operator
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.skipif(BACKEND != "torch", reason="counts torch tensors")
@pytest.mark.parametrize("fresh", [False, True])
def test_memory_is_constant_over_300_products_or_operators_r23(fresh):
    import torch

    model = classifier()
    v = np.ones(53)
    operator = gauss_newton(model, X, Y)

    def run(times):
        for _ in range(times):
            (gauss_newton(model, X, Y) if fresh else operator) @ v
        gc.collect()
        objects = gc.get_objects()
        return sum(issubclass(type(o), torch.Tensor) for o in objects), len(objects)

    run(20)  # what is cached once
    before = run(20)
    after = run(300)
    assert after[0] == before[0]
    assert after[1] - before[1] < 300  # not one object of any kind for each
