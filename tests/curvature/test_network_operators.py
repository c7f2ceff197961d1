"""The operators of a network against dense matrices: NumPy's, or row by row."""

import brute_force
import keras
import numpy as np
import oracle
import problems
import pytest
from brute_force import array
from keras import ops

from keras_secondorder import autodiff
from keras_secondorder.curvature import (
    empirical_fisher,
    fisher,
    gauss_newton,
    hessian,
)
from keras_secondorder.testing import check_operator

# Sums of some dozen float32 products, compared with the largest entry.
RTOL = 1e-5
# Float32 gradients, good to 1e-7, over a step of 1e-2; its square is below that.
DIFFERENCES_RTOL = 1e-3
FOUR = problems.classification(4)
L, K = keras.layers, keras.losses
RNG = np.random.default_rng(4)


def close(ours, right, rtol=RTOL):
    ours = array(ours) if ops.is_tensor(ours) else ours
    np.testing.assert_allclose(ours, right, rtol=0, atol=rtol * np.abs(right).max())


def compiled(model, loss, **options):
    problems.fill(model)
    model.compile(loss=loss, **options)
    return model


# --- Dense networks against NumPy --------------------------------------------------

BATCH = problems.classification().batches()[0]
DENSE = {
    "mse": ("mse", "linear", BATCH.x[:, :3]),
    "bce": ("binary_crossentropy", "sigmoid", BATCH.one_hot),
    "ce_logits": (K.CategoricalCrossentropy(from_logits=True), "linear", BATCH.one_hot),
    "poisson": ("poisson", "exponential", 1.0 + BATCH.one_hot),
}


@pytest.mark.parametrize("kind", DENSE)
def test_dense_network(kind):
    """All operators, with L2 penalties and sample weights of which one is 0."""
    loss, activation, y = DENSE[kind]
    l2 = {"kernel_regularizer": keras.regularizers.L2(0.05)}
    layers = [problems.dense(2, "tanh", **l2), problems.dense(3, activation)]
    model = compiled(problems.sequential(layers), loss)
    data = BATCH.x, y, BATCH.sample_weight
    w = BATCH.sample_weight / len(BATCH.x)
    layers = problems.oracle_layers(model)

    def gradient(theta):
        moved = oracle.moved(layers, theta - oracle.flat(layers))
        return oracle.gradient(moved, kind, BATCH.x, y, w)

    H = hessian(model, *data)
    close(H.to_dense(), brute_force.differences(gradient, oracle.flat(layers)))
    check_operator(H, model=model)
    F_right = oracle.fisher(layers, kind, BATCH.x, w)
    eta = np.concatenate([layer.eta.ravel() for layer in layers])
    G = gauss_newton(model, *data)
    close(G.to_dense(), F_right + np.diag(eta))
    check_operator(G, psd=True, model=model)
    close(fisher(model, BATCH.x, sample_weight=BATCH.sample_weight).to_dense(), F_right)

    J, z = oracle.jacobian(layers, BATCH.x), oracle.run(layers, BATCH.x).z
    out = brute_force.Output(z, J, np.arange(len(z)))
    s = brute_force.example_gradients(kind, out, y, w)
    E = empirical_fisher(model, *data)
    close(E.to_dense(), s.T @ s)
    g = s[w > 0] / np.sqrt(w[w > 0])[:, None]
    C = empirical_fisher(model, *data, centered=True)
    close(C.to_dense(), w.sum() * np.cov(g.T, aweights=w[w > 0], ddof=0))
    for operator in (E, C):
        check_operator(operator, psd=True, model=model)


REDUCED = [("mse", None), ("bce", None), ("ce_logits", None), ("huber", None)] + [
    (kind, r) for kind in ("mse", "ce_logits") for r in ("sum", "mean")
]


@pytest.mark.parametrize(("kind", "reduction"), REDUCED)
def test_gauss_newton_of_a_linear_model_is_the_hessian_r10(kind, reduction):
    loss, y = {
        "mse": (K.MeanSquaredError, BATCH.x[:, :3]),
        "bce": (K.BinaryCrossentropy, BATCH.one_hot),
        "ce_logits": (K.CategoricalCrossentropy, BATCH.one_hot),
        "huber": (K.Huber, 2 * BATCH.x[:, :3]),
    }[kind]
    options = {} if kind in ("mse", "huber") else {"from_logits": True}
    loss = loss(reduction=reduction or "sum_over_batch_size", **options)
    model = compiled(problems.sequential([problems.dense(3)], inputs=(2,)), loss)
    x, weight = BATCH.x[:, :2], np.array([0, 1, 3, 1, 1, 1, 1, 1], "float32")
    w = weight if reduction == "sum" else weight / len(x)
    kind = "bce_logits" if kind == "bce" else kind
    layers = problems.oracle_layers(model)
    J, z = oracle.jacobian(layers, x), oracle.run(layers, x).z
    out = brute_force.Output(z, J, np.arange(len(z)))
    right = brute_force.gauss_newton(kind, out, y, w)
    close(hessian(model, x, y, weight).to_dense(), right)
    close(gauss_newton(model, x, y, weight).to_dense(), right)


# --- other layers, row by row ------------------------------------------------------

BITS = np.array([[0], [1], [1], [0]], "float32")
SERIES = RNG.normal(size=(4, 3, 2)).astype("float32")
IMAGES = RNG.normal(size=(4, 4, 4, 1)).astype("float32")
NUMBERS = np.array([[1, 2, 0], [3, 0, 0], [1, 1, 4], [2, 0, 0]], "int32")
FOUND = NUMBERS.ravel() > 0
TOKENS = RNG.integers(0, 3, (4, 3))
LOGITS = K.SparseCategoricalCrossentropy(from_logits=True)
BIT_LOGITS = K.BinaryCrossentropy(from_logits=True)
QUARTERS = np.full(4, 0.25)
REAL = FOUR.x[:, :2] ** 2


def convolution():
    layers = [L.Conv2D(2, 3, activation="tanh"), L.Flatten(), L.Dense(2)]
    return problems.sequential(layers, inputs=(4, 4, 1))


def recurrent(layer, units):
    return problems.sequential([layer(3), L.Dense(units)], inputs=(3, 2))


def normalized():
    middle = [L.Dense(3, "tanh"), L.BatchNormalization(), L.Dense(2)]
    model = problems.sequential(middle)
    model.layers[1].moving_mean.assign([0.3, -0.2, 0.1])
    return model


def layer_normalized():
    middle = [L.Dense(3, "tanh"), L.LayerNormalization(), L.Dense(2)]
    return problems.sequential(middle)


def dropped():
    layers = [L.Dense(4, "tanh"), L.Dropout(0.5, seed=3), L.Dense(2)]
    return problems.sequential(layers)


def tokens():
    layers = [L.Embedding(5, 2, mask_zero=True), L.Dense(3)]
    model = keras.Sequential([keras.Input((3,), dtype="int32"), *layers])
    problems.fill(model)
    return model


def masked():
    layers = [L.Masking(), L.SimpleRNN(2), L.Dense(2)]
    return problems.sequential(layers, inputs=(3, 2))


def half_frozen():
    model = problems.sequential([L.Dense(3, "tanh"), L.Dense(3, "tanh"), L.Dense(2)])
    model.layers[1].trainable = False
    return model


ENDED = SERIES * np.array([[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 0]])[:, :, None]
OTHERS = {
    # model, loss, its name, x, y for Keras, y for NumPy, weights, training
    "convolution": (convolution, "mse", "mse", IMAGES, REAL, REAL, QUARTERS, False),
    "simple RNN": (
        lambda: recurrent(L.SimpleRNN, 3), LOGITS, "ce_logits", SERIES,
        FOUR.classes, FOUR.one_hot, QUARTERS, False,
    ),
    "LSTM, y (N,)": (
        lambda: recurrent(L.LSTM, 1), BIT_LOGITS, "bce_logits", SERIES,
        BITS[:, 0], BITS, QUARTERS, False,
    ),
    "normalized": (normalized, "mse", "mse", FOUR.x, REAL, REAL, QUARTERS, False),
    "normalizing": (normalized, "mse", "mse", FOUR.x, REAL, REAL, QUARTERS, True),
    "layer normalized": (
        layer_normalized, "mse", "mse", FOUR.x, REAL, REAL, QUARTERS, False,
    ),
    "dropout": (dropped, "mse", "mse", FOUR.x, REAL, REAL, QUARTERS, True),
    "tokens": (
        tokens, LOGITS, "ce_logits", NUMBERS, TOKENS, np.eye(3)[TOKENS.ravel()],
        FOUND / FOUND.sum(), False,
    ),
    "masked series": (
        masked, "mse", "mse", ENDED.astype("float32"), REAL, REAL, QUARTERS, False,
    ),
    "half frozen": (half_frozen, "mse", "mse", FOUR.x, REAL, REAL, QUARTERS, False),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_other_layers_r13_r16_r17(name):
    make, loss, kind, x, y, y_rows, w, training = OTHERS[name]
    model = make()
    model.compile(loss=loss)
    state = [array(v) for v in model.non_trainable_variables]
    (out,) = brute_force.outputs(model, x, training)
    right = brute_force.gauss_newton(kind, out, y_rows, w)
    G = gauss_newton(model, x, y, training=training)
    close(G.to_dense(), right)
    v = RNG.normal(size=G.shape[0])
    close(G @ v, right @ v)  # also a second time: the masks are the same
    s = brute_force.example_gradients(kind, out, y_rows, w)
    E = empirical_fisher(model, x, y, training=training)
    close(E.to_dense(), s.T @ s)
    H = hessian(model, x, y, training=training)
    check_operator(H, model=model)
    right = gradient_difference(model, kind, x, y_rows, w, training, v)
    close(H @ v, right, DIFFERENCES_RTOL)
    for variable, before in zip(model.non_trainable_variables, state, strict=True):
        np.testing.assert_array_equal(array(variable), before)


def gradient_difference(model, kind, x, y, w, training, v, step=1e-2):
    """`(g(theta + step v) - g(theta - step v)) / 2 step`, with `|v| = 1` inside."""
    x = ops.convert_to_tensor(x)
    start = [array(p) for p in model.trainable_variables]
    state = [p.value for p in model.non_trainable_variables]
    ends = np.cumsum([p.size for p in start])[:-1]
    length = np.linalg.norm(v)

    def network(primals, tap):
        z, _ = model.stateless_call(primals, state, x, training=training)
        return [z], ()

    def gradient(t):
        moved = [
            ops.convert_to_tensor((p + t * d.reshape(p.shape)).astype("float32"))
            for p, d in zip(start, np.split(v / length, ends), strict=True)
        ]
        linear = autodiff.vjp(network, moved, taps=False)
        z = array(linear.outputs[0])
        seed = w[:, None] * oracle.loss_gradient(kind, z.reshape(len(w), -1), y)
        seed = ops.convert_to_tensor(seed.reshape(z.shape).astype("float32"))
        return brute_force.flat(linear.pullback([seed]))

    return length * (gradient(step) - gradient(-step)) / (2 * step)


# --- several inputs, outputs and terms (R15, R16) ----------------------------------


def two_by_three():
    """Two inputs; outputs a, b, and c, which has no loss but a layer of its own."""
    first, second = keras.Input((2,)), keras.Input((3,))
    hidden = L.Dense(3, "tanh")(L.Concatenate()([first, second]))
    a, b = L.Dense(2, name="a")(hidden), L.Dense(3, name="b")(hidden)
    c = L.Dense(1, name="c")(hidden)
    model = keras.Model([first, second], {"a": a, "b": b, "c": c})
    losses = {"a": "mse", "b": LOGITS}
    return compiled(model, losses, loss_weights={"a": 0.7, "b": 2.0})


def test_two_inputs_and_outputs_and_a_layer_without_loss_r15_r16():
    model = two_by_three()
    x = [FOUR.x[:, :2], FOUR.x[:, 3:]]
    y = {"a": REAL, "b": FOUR.classes}
    a, b, c = brute_force.outputs(model, x)
    terms = [("mse", a, REAL, 0.7 / 4), ("ce_logits", b, FOUR.one_hot, 2.0 / 4)]
    terms = [(kind, z, t, np.full(4, w)) for kind, z, t, w in terms]
    right = sum(brute_force.gauss_newton(*term) for term in terms)
    G = gauss_newton(model, x, y)
    close(G.to_dense(), right)
    close(fisher(model, x).to_dense(), right)
    check_operator(G, psd=True, model=model)
    # The last layer of c, 3 + 1 weights, is trainable, and no loss reaches it.
    used = np.abs(a.J).sum((0, 1)) + np.abs(b.J).sum((0, 1)) > 0
    assert (~used).sum() == 4
    H = array(hessian(model, x, y).to_dense())
    assert np.all(H[~used] == 0.0) and np.abs(H[used]).max() > 0
    s = sum(brute_force.example_gradients(*term) for term in terms)
    close(empirical_fisher(model, x, y).to_dense(), s.T @ s)
    omega = np.full(4, 0.7 / 4 + 2.0 / 4)
    mean = (np.sqrt(omega)[:, None] * s).sum(0) / np.sqrt(omega.sum())
    C = empirical_fisher(model, x, y, centered=True)
    close(C.to_dense(), s.T @ s - np.outer(mean, mean))
    check_operator(C, psd=True)


@pytest.mark.parametrize("case", ["tokens", "two heads"])
def test_equal_examples_have_no_covariance(case):
    """The mean is that of examples, and not of positions or heads."""
    if case == "tokens":
        model, x, y = tokens(), NUMBERS[[2] * 3], TOKENS[[2] * 3]
        model.compile(loss=LOGITS)
    else:
        model, x = two_by_three(), [FOUR.x[[1] * 3, :2], FOUR.x[[1] * 3, 3:]]
        y = {"a": REAL[[1] * 3], "b": FOUR.classes[[1] * 3]}
    E = array(empirical_fisher(model, x, y).to_dense())
    C = array(empirical_fisher(model, x, y, centered=True).to_dense())
    assert np.abs(C).max() <= RTOL * np.abs(E).max()


class Cubed(keras.layers.Layer):
    def call(self, inputs):
        self.add_loss(0.1 * ops.sum(inputs**3))
        return inputs


@pytest.mark.parametrize("loss", ["mse", None])
def test_added_loss_is_in_the_hessian_alone_r15(loss):
    """`0.1 sum z^3` has the output Hessian `diag(0.6 z)`, which is not convex."""
    model = problems.sequential([L.Dense(2), Cubed()])
    model.compile(loss=loss)
    (out,) = brute_force.outputs(model, FOUR.x)
    y = None if loss is None else REAL
    added = 0.6 * out.z[:, :, None] * np.eye(2)
    right = np.einsum("nkp,nkl,nlq->pq", out.J, added, out.J)
    if loss is not None:
        G = brute_force.gauss_newton("mse", out, REAL, QUARTERS)
        close(gauss_newton(model, FOUR.x, REAL).to_dense(), G)
        right = right + G
    close(hessian(model, FOUR.x, y).to_dense(), right)


def test_a_negative_weight_counts_as_zero_in_gauss_newton():
    loss, activation, y = DENSE["ce_logits"]
    model = compiled(problems.sequential([problems.dense(3, activation)]), loss)
    weight = np.where(np.arange(len(y)) % 2, 1.0, -1.0)
    ours = gauss_newton(model, BATCH.x, y, sample_weight=weight)
    right = gauss_newton(model, BATCH.x, y, sample_weight=np.maximum(weight, 0.0))
    close(ours.to_dense(), array(right.to_dense()))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_labels_weigh_as_much_as_they_sum_to(smoothing):
    # Rows of zeros are how unlabelled pixels are written. The logits' gradient on
    # TensorFlow is that of labels that sum to 1.
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])
    loss = keras.losses.CategoricalCrossentropy(
        from_logits=True, label_smoothing=smoothing
    )
    model.compile(loss=loss)
    draw = np.random.default_rng(0)
    x = draw.normal(size=(5, 3)).astype("float32")
    y = np.eye(4, dtype="float32")[[0, 1, 2, 3, 0]]
    y *= np.array([[1], [0], [2], [0.5], [1]], "float32")
    H = hessian(model, x, y).to_dense()
    G = gauss_newton(model, x, y).to_dense()
    np.testing.assert_allclose(np.array(G), np.array(H), rtol=2e-4, atol=1e-5)

    z = x @ np.array(model.layers[0].kernel)
    p = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
    t = y * (1 - smoothing) + smoothing / 4
    fixed = keras.backend.backend() == "tensorflow"
    g = (1.0 if fixed else t.sum(axis=1, keepdims=True)) * p - t
    rows = np.einsum("ni,nj->nij", np.pad(x, ((0, 0), (0, 1)), constant_values=1), g)
    rows = np.concatenate([rows[:, :3].reshape(5, -1), rows[:, 3]], axis=1)
    E = empirical_fisher(model, x, y).to_dense()
    np.testing.assert_allclose(np.array(E), rows.T @ rows / 5, rtol=2e-4, atol=1e-5)
