"""Batches that grow: their sizes, and that every row comes once in a pass."""

import keras
import numpy as np
import pytest

from keras_secondorder.callbacks import GrowingBatches


def epoch(data):
    batches = [data[i] for i in range(len(data))]
    data.on_epoch_end()
    return batches


def test_sizes_follow_the_formula_to_the_next_power_below():
    data = GrowingBatches(np.zeros(1000), first=10, growth=20.0)
    for step in range(1, 200):
        right = min(10 * np.exp((step - 1) / 20), 1000)
        assert data.size(step) <= right + 1e-6
        assert data.size(step) > right / np.sqrt(2) - 1
    assert data.size(200) == 1000
    assert len({data.size(i) for i in range(1, 200)}) < 16


def test_every_row_comes_once_in_a_pass():
    x = np.arange(50)
    data = GrowingBatches(x, 2 * x, first=8, growth=10.0, steps=6, seed=3)
    batches = [batch for _ in range(4) for batch in epoch(data)]
    assert [len(a) for a, _ in batches] == [data.size(i) for i in range(1, 25)]
    seen = np.concatenate([a for a, _ in batches])
    passes = len(seen) // 50
    assert passes > 5
    orders = seen[: 50 * passes].reshape(passes, 50)
    assert (np.sort(orders) == x).all()
    assert (orders[0] != orders[1]).any()
    for a, b in batches:
        np.testing.assert_array_equal(b, 2 * a)


def test_fit_goes_on_where_it_was():
    """Keras looks at the data and ends an epoch before the first."""
    x = np.arange(96, dtype="float32")[:, None]
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.SGD(0.0), loss="mse")
    data = GrowingBatches(x, x, first=8, growth=4.0, steps=4)
    model.fit(data, epochs=3, verbose=0)
    expected = GrowingBatches(x, x, first=8, growth=4.0, steps=4)
    for _ in range(3):
        epoch(expected)
    for ours, right in zip(epoch(data), epoch(expected), strict=True):
        np.testing.assert_array_equal(ours[0], right[0])
    assert int(model.optimizer.iterations) == 12


def test_wrong_arguments():
    with pytest.raises(ValueError, match="`first` and `steps` must be at least 1"):
        GrowingBatches(np.zeros(3), first=0)
    with pytest.raises(ValueError, match=r"the lengths \[3, 4\]"):
        GrowingBatches(np.zeros(3), np.zeros(4))
