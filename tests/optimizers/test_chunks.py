"""A batch in chunks gives the step of the whole batch."""

import keras
import numpy as np
import problems
import pytest
from keras import ops

import keras_secondorder as kso

ROWS, CHUNK = 150, 32  # chunks of 30 from the batch, and of 32 and 31 from its parts
# What sums in another order leave, relative to the largest value.
RTOL = 2e-4
K = keras.losses
MSE = K.MeanSquaredError
# Arguments of the optimizer, the reduction of the loss, and whether there are weights.
# `test_chunks_of_any_size` has a mean without weights.
CASES = {
    "sum": ({}, "sum", True),
    "hessian": ({"curvature": "hessian", "preconditioner": None}, "sum", False),
    "fisher": ({"curvature": "fisher", "curvature_fraction": 0.5}, "sum", True),
    "scale-sensitive": (
        {"damping_matrix": "diagonal", "curvature_fraction": 1.0},
        "sum_over_batch_size",
        True,
    ),
}


def array(tensor):
    return ops.convert_to_numpy(tensor)


def network(*layers):
    penalty = keras.regularizers.L2(0.01)
    first = problems.dense(5, "tanh", kernel_regularizer=penalty)
    return problems.sequential([first, *layers, problems.dense(2)], scale=0.5)


def train(chunk_size, case, rows=ROWS):
    """The logs and the weights after two steps."""
    arguments, reduction, weighted = CASES[case]
    settings = {"cg_iterations": 6, "damping": 0.5, **arguments}
    model = network()
    model.compile(
        optimizer=kso.HessianFree(chunk_size=chunk_size, **settings),
        loss=MSE(reduction=reduction),
        metrics=["mae"],
        weighted_metrics=["mse"],
    )
    data = problems.classification(rows)
    weight = data.sample_weight if weighted else None
    history = model.fit(
        data.x,
        data.x[:, :2] ** 2,
        sample_weight=weight,
        batch_size=rows,
        shuffle=False,
        epochs=2,
        verbose=0,
    ).history
    return history, problems.parameters(model)


@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_the_whole_batch(case):
    (right, theirs), (logs, ours) = (train(c, case) for c in (None, CHUNK))
    assert set(logs) == set(right)
    for name in ("loss", "mae", "mse", "step_length"):
        np.testing.assert_allclose(logs[name], right[name], rtol=RTOL, err_msg=name)
    start = problems.parameters(network())
    assert np.abs(theirs - start).max() > 0.01
    np.testing.assert_allclose(ours, theirs, atol=RTOL * np.abs(theirs - start).max())


def test_chunks_of_any_size():
    """Also where the number of examples changes from batch to batch."""
    x = problems.classification(40).x

    def run(size, *batches):
        model, weights, losses = network(), [], []
        optimizer = kso.HessianFree(chunk_size=size, cg_iterations=4, damping=0.5)
        model.compile(optimizer=optimizer, loss="mse")
        for rows in batches:
            logs = model.train_on_batch(x[rows], x[rows, :2], return_dict=True)
            losses.append(float(logs["loss"]))
            model.reset_metrics()
            weights.append(problems.parameters(model))
        return weights, losses

    first, second = slice(25), slice(25, 40)
    right, losses = run(None, first, second)
    for size in (1, 7, 1000):
        batches = (first, second) if size == 7 else (first,)
        ours, their_losses = run(size, *batches)
        np.testing.assert_allclose(their_losses, losses[: len(batches)], rtol=RTOL)
        for a, b in zip(ours, right, strict=False):
            np.testing.assert_allclose(a, b, atol=1e-4)


def test_a_step_with_dropout_advances_its_seed_once():
    x = problems.classification(64).x
    seeds = []
    for size in (None, 16):
        model = network(keras.layers.Dropout(0.5, seed=3))
        model.compile(optimizer=kso.HessianFree(chunk_size=size), loss="mse")
        model.train_on_batch(x, x[:, :2])
        seeds.append([array(v) for v in model.non_trainable_variables])
    assert len(seeds[0]) == 1
    np.testing.assert_array_equal(*seeds)


def test_a_chunk_with_nan_skips_the_step():
    x = problems.classification(64).x.copy()
    x[60, 0] = np.nan
    model = network()
    model.compile(optimizer=kso.HessianFree(chunk_size=16), loss="mse")
    before = problems.parameters(model)
    logs = model.train_on_batch(x, x[:, 1:3], return_dict=True)
    assert int(logs["skipped_steps"]) == 1
    np.testing.assert_array_equal(problems.parameters(model), before)


def test_messages():
    x = problems.classification(8).x
    with pytest.raises(ValueError, match="is not the sum of its chunks. Received a"):
        model = network(keras.layers.BatchNormalization())
        model.compile(optimizer=kso.HessianFree(chunk_size=4), loss="mse")
        model.train_on_batch(x, x[:, :2])
    with pytest.raises(ValueError, match="Kronecker factors are estimated in one"):
        kso.HessianFree(chunk_size=4, preconditioner="kronecker")
    with pytest.raises(ValueError, match="chunk_size"):
        kso.HessianFree(chunk_size=0)


def tagger(mask_zero):
    layers = [keras.layers.Embedding(9, 4, mask_zero=mask_zero), keras.layers.Dense(3)]
    return keras.Sequential([keras.Input((4,)), *layers])


def tokens():
    x = np.where(np.arange(80).reshape(20, 4) % 3, 2, 0)
    return x, np.arange(80).reshape(20, 4) % 3


@pytest.mark.parametrize(
    "loss", [K.SparseCategoricalCrossentropy(from_logits=True, ignore_class=1), "mask"]
)
def test_means_over_what_is_not_masked_are_refused(loss):
    x, y = tokens()
    model = tagger(loss == "mask")
    if loss == "mask":
        loss = K.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=kso.HessianFree(chunk_size=5), loss=loss)
    with pytest.raises(ValueError, match="masked or ignored positions"):
        model.train_on_batch(x, y)


@pytest.mark.parametrize("loss", [K.Dice(), K.Tversky()])
@pytest.mark.filterwarnings("ignore:The loss '.*' couples")
def test_losses_that_compare_examples_are_refused(loss):
    model = network()
    model.compile(optimizer=kso.HessianFree(chunk_size=16), loss=loss)
    y = np.arange(40) % 2
    with pytest.raises(ValueError, match="compares them with one another"):
        model.train_on_batch(problems.classification(40).x, np.stack([y, y], 1))


def test_means_over_the_weights_are_refused():
    model = network()
    loss = MSE(reduction="mean_with_sample_weight")
    model.compile(optimizer=kso.HessianFree(chunk_size=16), loss=loss)
    x = problems.classification(40).x
    with pytest.raises(ValueError, match="weights of the whole batch"):
        model.fit(x, x[:, :2], verbose=0)
