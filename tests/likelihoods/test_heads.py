"""What the package reads out of `compile`: losses, heads, and position weights."""

import keras
import numpy as np
import problems
import pytest
from keras import ops

from keras_secondorder.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    Poisson,
    by_position,
    likelihood_of,
    loss_weights_of,
    position_weights,
    read_heads,
)
from keras_secondorder.likelihoods.heads import as_loss

# Sums of a few float32 numbers of order 1.
RTOL = 1e-5
RNG = np.random.default_rng(0)
losses = keras.losses


def tensor(array):
    return ops.convert_to_tensor(np.asarray(array))


def numpy(x):
    return ops.convert_to_numpy(x)


# --- which likelihood --------------------------------------------------------------

LABELS = {"one-hot": np.eye(3)[[0, 2]], "bits": np.ones((2, 1)), "sparse": [[0], [2]]}


@pytest.mark.parametrize(
    ("loss", "labels", "cls", "from_logits"),
    [
        ("mse", "one-hot", Gaussian, None),
        ("mean_squared_error", "one-hot", Gaussian, None),
        ("MeanSquaredError", "one-hot", Gaussian, None),
        (losses.mean_squared_error, "one-hot", Gaussian, None),
        (losses.MeanSquaredError(), "one-hot", Gaussian, None),
        ("binary_crossentropy", "one-hot", Bernoulli, False),
        (losses.binary_crossentropy, "one-hot", Bernoulli, False),
        (losses.BinaryCrossentropy(), "one-hot", Bernoulli, False),
        (losses.BinaryCrossentropy(from_logits=True), "bits", Bernoulli, True),
        ("categorical_crossentropy", "one-hot", Categorical, False),
        (losses.categorical_crossentropy, "one-hot", Categorical, False),
        (losses.CategoricalCrossentropy(from_logits=True), "one-hot", Categorical, 1),
        ("sparse_categorical_crossentropy", "sparse", Categorical, False),
        (losses.sparse_categorical_crossentropy, "sparse", Categorical, False),
        (losses.SparseCategoricalCrossentropy(from_logits=True), "sparse", Categorical,
         True),
        ("poisson", "one-hot", Poisson, None),
        (losses.poisson, "one-hot", Poisson, None),
        (losses.Poisson(), "one-hot", Poisson, None),
        ("crossentropy", "one-hot", Categorical, False),
        ("crossentropy", "sparse", Categorical, False),
        ("ce", "bits", Bernoulli, False),
    ],
)  # fmt: skip
def test_likelihood_of_every_form_of_a_loss(loss, labels, cls, from_logits):
    y = tensor(np.asarray(LABELS[labels], "float32"))
    z = tensor(np.full((2, 1 if labels == "bits" else 3), 0.3, "float32"))
    likelihood = likelihood_of(as_loss(loss, y, z), y, z)
    assert type(likelihood) is cls
    if from_logits is not None:
        assert likelihood.from_logits == from_logits


# --- how much every position counts ------------------------------------------------


def expected_weights(shape, reduction, sample_weight=None, mask=None):
    """`dLoss / dl_i` by Keras's definition of its reductions."""
    w = np.ones(shape)
    if sample_weight is not None:
        w = w * np.reshape(sample_weight, np.shape(sample_weight)[: len(shape)])
    averaging = reduction in ("sum_over_batch_size", "mean")
    if mask is not None:
        w = w * mask * (mask.size / mask.sum() if averaging else 1.0)
    if averaging:
        return w / w.size
    weighted = sample_weight is not None or mask is not None
    if reduction == "mean_with_sample_weight":
        return w / (w.sum() if weighted else w.size)
    return w


REDUCTIONS = ["sum_over_batch_size", "mean", "sum", "mean_with_sample_weight", None]
N, T = 4, 3
SAMPLE_WEIGHTS = {
    "none": None,
    "(N,)": np.array([0.0, 1.0, 3.0, 1.0], "float32"),
    "(N, 1)": np.array([[0.0], [1.0], [3.0], [1.0]], "float32"),
    "(N, T)": np.array([[1, 0, 2], [0, 0, 0], [1, 1, 1], [3, 1, 0.5]], "float32"),
}
MASK = np.array([[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 1, 0]], float)


class Compiled:
    """As much of a compiled model as `read_heads` looks at."""

    def __init__(self, loss, output_names=("output",)):
        self.loss, self.output_names = loss, list(output_names)


def one_head(loss, y, z, sample_weight, loss_weight=None):
    sample_weight = None if sample_weight is None else tensor(sample_weight)
    (head,) = read_heads(
        Compiled(loss), tensor(y), z, sample_weight, loss_weights=loss_weight
    )
    return head


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weights", ["none", "(N,)", "(N, 1)"])
@pytest.mark.parametrize("loss_weight", [None, 0.25])
def test_position_weights_of_examples(reduction, weights, loss_weight):
    """R19: weights (0, 1, 3) enter exactly, a row of weight 0 not at all."""
    z = tensor(RNG.normal(size=(N, 2)).astype("float32"))
    loss = losses.MeanSquaredError(reduction=reduction)
    sw = SAMPLE_WEIGHTS[weights]
    head = one_head(loss, np.zeros((N, 2), "float32"), z, sw, loss_weight)
    right = expected_weights((N,), reduction, sw) * (loss_weight or 1.0)
    ours = numpy(position_weights(head, z, z))
    np.testing.assert_allclose(ours, right, rtol=RTOL)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weights", ["none", "(N, T)"])
@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("ignore", [False, True])
def test_position_weights_of_tokens(reduction, weights, masks, ignore):
    """Tokens (N, T, C) with weights, a mask from the model, and an ignored class."""
    embed = keras.layers.Embedding(5, 3, mask_zero=masks)
    z = embed(tensor(MASK.astype("int32") * 2))
    y = RNG.integers(0, 3, (N, T))
    y[0, 0] = y[2, 2] = 1 if not ignore else -1
    loss = losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction=reduction, ignore_class=-1 if ignore else None
    )
    sw = SAMPLE_WEIGHTS[weights]
    mask = None
    if masks or ignore:
        mask = (MASK if masks else 1.0) * ((y != -1) if ignore else np.ones((N, T)))
    right = expected_weights((N, T), reduction, sw, mask)
    head = one_head(loss, y, z, sw)
    ours = numpy(position_weights(head, ops.stop_gradient(z), z))
    np.testing.assert_allclose(ours, right, rtol=RTOL)


def test_everything_masked_or_weighted_away_is_zero_not_nan():
    z = tensor(np.ones((N, 2), "float32"))
    loss = losses.MeanSquaredError(reduction="mean_with_sample_weight")
    head = one_head(loss, np.zeros((N, 2), "float32"), z, np.zeros(N, "float32"))
    np.testing.assert_array_equal(numpy(position_weights(head, z, z)), np.zeros(N))


# --- the heads of whole models -----------------------------------------------------


def tokens(mask_zero=False):
    model = problems.sequential(
        [keras.layers.Embedding(6, 3, mask_zero=mask_zero), problems.dense(3)],
        inputs=(T,),
    )
    x = RNG.integers(1, 6, (N, T))
    return model, x * MASK.astype("int32") if mask_zero else x


def masking():
    model = problems.sequential(
        [keras.layers.Masking(), problems.dense(1)], inputs=(T, 2)
    )
    x = RNG.normal(size=(N, T, 2)) * MASK[:, :, None]
    return model, x.astype("float32")


def single(units=2, activation=None):
    model = problems.sequential([problems.dense(units, activation)])
    return model, problems.classification(N).x


def two_outputs(as_dict=False):
    inputs = keras.Input((problems.FEATURES,))
    outputs = {
        "b": problems.dense(2, name="b")(inputs),
        "a": problems.dense(3, name="a")(inputs),
    }
    model = keras.Model(inputs, outputs if as_dict else list(outputs.values()))
    problems.fill(model)
    return model, problems.classification(N).x


def own_mse(y_true, y_pred):
    return ops.mean((y_true - y_pred) ** 2, axis=-1)


def rows(*shape):
    return np.random.default_rng(5).normal(size=(N, *shape)).astype("float32")


CLASSES = np.array([0, 2, 1, 1])
SPARSE = losses.SparseCategoricalCrossentropy(from_logits=True)
SW = SAMPLE_WEIGHTS["(N,)"]
TWO = [rows(2), rows(3)]

ZOO = {
    "one output": (single, {"loss": "mse"}, rows(2), SW),
    "loss weight": (single, {"loss": "mse", "loss_weights": 0.3}, rows(2), SW),
    "y of rank one": (lambda: single(1), {"loss": "mse"}, rows(), SW),
    "bits of rank one": (
        lambda: single(1, "sigmoid"), {"loss": "bce"}, CLASSES % 2, None
    ),
    "classes of rank one": (lambda: single(3), {"loss": SPARSE}, CLASSES, SW),
    "classes in a column": (
        lambda: single(3), {"loss": SPARSE}, CLASSES[:, None], SW
    ),
    "one-hot": (
        lambda: single(3, "softmax"), {"loss": "categorical_crossentropy"},
        np.eye(3, dtype="float32")[CLASSES], None,
    ),
    "crossentropy": (
        lambda: single(3, "softmax"), {"loss": "crossentropy"}, CLASSES, SW
    ),
    "label smoothing": (
        lambda: single(3, "softmax"),
        {"loss": losses.CategoricalCrossentropy(label_smoothing=0.2)},
        np.eye(3, dtype="float32")[CLASSES], SW,
    ),
    "own function": (lambda: single(1), {"loss": own_mse}, rows(), SW),
    "tokens": (
        tokens, {"loss": SPARSE}, RNG.integers(0, 3, (N, T)), SAMPLE_WEIGHTS["(N, T)"]
    ),
    "masked tokens": (
        lambda: tokens(True), {"loss": SPARSE}, RNG.integers(0, 3, (N, T)), None
    ),
    "masked, weighted tokens": (
        lambda: tokens(True),
        {"loss": losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="mean_with_sample_weight")},
        RNG.integers(0, 3, (N, T)), SAMPLE_WEIGHTS["(N, T)"],
    ),
    "masked sequence": (masking, {"loss": "mse"}, rows(T, 1), None),
    "(N, T) against (N, T, 1)": (
        lambda: (problems.sequential([problems.dense(1)], inputs=(T, 2)), rows(T, 2)),
        {"loss": "mse"}, rows(T), SW,
    ),
    "own function, (N, T) against (N, T, 1)": (
        lambda: (problems.sequential([problems.dense(1)], inputs=(T, 2)), rows(T, 2)),
        {"loss": own_mse}, rows(T), SW,
    ),
    "two outputs, one loss": (two_outputs, {"loss": "mse"}, TWO, SW),
    "two outputs": (
        two_outputs, {"loss": ["mse", own_mse], "loss_weights": [0.2, 3.0]}, TWO,
        [SW, SW[::-1].copy()],
    ),
    "dict of losses": (
        two_outputs,
        {"loss": {"a": SPARSE, "b": "mse"}, "loss_weights": {"a": 0.5, "b": 2.0}},
        {"a": CLASSES, "b": rows(2)}, None,
    ),
    "dict of losses, list of targets": (
        two_outputs, {"loss": {"a": SPARSE, "b": "mse"}}, [rows(2), CLASSES], None
    ),
    "dict outputs": (
        lambda: two_outputs(True),
        {"loss": {"a": SPARSE, "b": "mse"}, "loss_weights": {"a": 0.5, "b": 2.0}},
        {"a": CLASSES, "b": rows(2)}, {"a": SW, "b": SW[::-1].copy()},
    ),
    "an output without a loss": (
        two_outputs, {"loss": [None, "mse"]}, TWO, None
    ),
    "an output without a loss, in a dict": (
        lambda: two_outputs(True), {"loss": {"a": "mse"}}, {"a": rows(3)}, SW
    ),
}  # fmt: skip


@pytest.fixture(params=list(ZOO))
def compiled(request):
    make, options, y, sample_weight = ZOO[request.param]
    model, x = make()
    model.compile(optimizer="sgd", **options)
    y, sample_weight = keras.tree.map_structure(
        lambda a: None if a is None else tensor(a), (y, sample_weight)
    )
    x = tensor(x)
    y_pred = model(x)
    total = model.compute_loss(x, y, y_pred, sample_weight)
    heads = read_heads(model, y, y_pred, sample_weight, loss_weights_of(model))
    return keras.tree.flatten(y_pred), heads, float(numpy(total))


def test_losses_of_the_heads_add_up_to_compute_loss(compiled):
    outputs, heads, total = compiled
    ours = sum(
        float(numpy(h.loss(h.y, outputs[h.output], h.sample_weight)))
        * (1.0 if h.loss_weight is None else h.loss_weight)
        for h in heads
    )
    np.testing.assert_allclose(ours, total, rtol=RTOL)


def test_weighted_positions_add_up_to_compute_loss(compiled):
    """`sum_i w_i l_i`, which says that the curvature is that of the objective."""
    outputs, heads, total = compiled
    ours = 0.0
    for h in heads:
        z = ops.stop_gradient(outputs[h.output])
        w = position_weights(h, z, outputs[h.output])
        # A loss's `call` expects what its `__call__` hands on.
        values = h.loss.call(ops.convert_to_tensor(h.y, dtype=h.loss.dtype), z)
        assert tuple(values.shape) == tuple(w.shape)
        assert by_position(z, w).shape[:-1] == tuple(w.shape)
        keep = numpy(w) > 0  # an ignored position may have no finite loss
        ours += float(np.sum(numpy(w)[keep] * numpy(values)[keep]))
    np.testing.assert_allclose(ours, total, rtol=RTOL)


def test_regularisers_are_no_head():
    model = problems.sequential([problems.dense(2, kernel_regularizer="l2")])
    model.compile(optimizer="sgd", loss="mse")
    x, y = tensor(problems.classification(N).x), tensor(rows(2))
    y_pred = model(x)
    (head,) = read_heads(model, y, y_pred, None)
    data = float(numpy(head.loss(y, y_pred)))
    penalty = float(numpy(sum(model.losses)))
    assert penalty > 1e-2
    total = float(numpy(model.compute_loss(x, y, y_pred)))
    np.testing.assert_allclose(data + penalty, total, rtol=RTOL)


def test_a_model_without_a_loss_has_no_heads():
    assert read_heads(Compiled(None), tensor([0.0]), tensor([[0.0]]), None) == []


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ({"c": "mse"}, "names outputs that the model does not have"),
        (["mse"] * 3, "`loss` has 3 entries, and the model has 2 outputs"),
    ],
)
def test_structures_that_do_not_match_are_refused(loss, message):
    outputs = [tensor(a) for a in TWO]
    with pytest.raises(ValueError, match=message):
        read_heads(Compiled(loss, ("a", "b")), outputs, outputs, None)


def test_one_array_of_targets_is_for_one_loss():
    outputs = [tensor(a) for a in TWO]
    with pytest.raises(ValueError, match="2 outputs with a loss, and `y` is one array"):
        read_heads(Compiled(["mse", "mse"], ("a", "b")), outputs[0], outputs, None)
    one_loss = Compiled(["mse", None], ("a", "b"))  # as Keras has it
    (head,) = read_heads(one_loss, outputs[0], outputs, None)
    np.testing.assert_array_equal(numpy(head.y), TWO[0])
