"""Batches that grow: their sizes, and that every row comes once in a pass."""

from itertools import islice

import keras
import numpy as np
import pytest

from keras_secondorder.callbacks import growing_batches


def test_sizes_follow_the_formula_to_the_next_power_below():
    batches = growing_batches(np.zeros(1000), first=10, growth=20.0)
    sizes = [len(x) for (x,) in islice(batches, 200)]
    for step, size in enumerate(sizes, start=1):
        right = min(10 * np.exp((step - 1) / 20), 1000)
        assert right / np.sqrt(2) - 1 < size <= right + 1e-6
    assert sizes[-1] == 1000
    assert len(set(sizes)) < 16


def test_every_row_comes_once_in_a_pass():
    x = np.arange(50)
    batches = list(islice(growing_batches(x, 2 * x, None, 8, 10.0, seed=3), 24))
    seen = np.concatenate([a for a, _ in batches])
    passes = len(seen) // 50
    assert passes > 5
    orders = seen[: 50 * passes].reshape(passes, 50)
    assert (np.sort(orders) == x).all()
    assert (orders[0] != orders[1]).any()
    for a, b in batches:
        np.testing.assert_array_equal(b, 2 * a)


def test_rows_of_several_inputs_stay_together():
    x = np.arange(50)
    data = {"a": x, "b": [2 * x, 3 * x]}, (4 * x,)
    for batch, (y,) in islice(growing_batches(*data, first=8), 3):
        for a, factor in ((batch["b"][0], 2), (batch["b"][1], 3), (y, 4)):
            np.testing.assert_array_equal(a, factor * batch["a"])


def test_fit_takes_them_in_order():
    """A model whose weight adds up what it sees: no batch is lost or seen twice."""
    x = np.arange(96, dtype="float32")[:, None]
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.compile(
        optimizer=keras.optimizers.SGD(1e-3),
        loss=keras.losses.MeanAbsoluteError(reduction="sum"),
    )
    model.layers[0].kernel.assign([[0.0]])  # below every target, so the slope is -x
    model.fit(
        growing_batches(x, 1e6 + x, first=8, growth=4.0),
        steps_per_epoch=4,
        epochs=3,
        verbose=0,
    )
    sums = [a.sum() for a, _ in islice(growing_batches(x, x, None, 8, 4.0), 12)]
    kernel = keras.ops.convert_to_numpy(model.layers[0].kernel)[0, 0]
    np.testing.assert_allclose(kernel, 1e-3 * sum(sums), rtol=1e-5)


def test_wrong_arguments():
    for name, wrong in (
        *(("first", 0), ("first", 1.5), ("first", np.nan)),
        *(("growth", 0.0), ("growth", np.nan), ("seed", -1)),
    ):
        with pytest.raises(ValueError, match=f"`{name}` must be"):
            growing_batches(np.zeros(3), **{name: wrong})
    for x in ([1, 2, 3], np.float32(1.0), {}, "abc"):
        with pytest.raises(ValueError, match="Inputs, targets and weights must"):
            growing_batches(x)
    with pytest.raises(ValueError, match=r"at least one. Received the lengths \[0\]"):
        growing_batches(np.zeros((0, 2)))
    with pytest.raises(ValueError, match=r"the lengths \[3, 4\]"):
        growing_batches(np.zeros(3), np.zeros(4))
