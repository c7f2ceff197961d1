"""Small models, data and comparisons for the tests of the training loop."""

import gc
import warnings

import keras
import numpy as np
import pytest

import keras_secondorder as kso

BACKEND = keras.config.backend()


def examples(rows=24, seed=0):
    """Six features, one of them always zero and one a copy, and three classes."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 6)).astype("float32")
    x[:, 2] = 0.0
    x[:, 4] = x[:, 1]
    return x, np.argmax(x @ rng.normal(size=(6, 3)), axis=1)


def crossentropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def classifier(seed=0):
    """6-4-3, tanh, logits: the same weights for the same seed."""
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(4, activation="tanh", name="hidden"),
            keras.layers.Dense(3, name="logits"),
        ]
    )


def compiled(model, optimizer=None, loss=None, **kwargs):
    model.compile(
        optimizer=kso.KFAC() if optimizer is None else optimizer,
        loss=crossentropy() if loss is None else loss,
        **kwargs,
    )
    return model


def fit(model, x, y, **kwargs):
    """`fit` in a fixed order, quietly; returns the history's lists by name."""
    settings = {"batch_size": 8, "shuffle": False, "verbose": 0}
    return model.fit(x, y, **{**settings, **kwargs}).history


def arrays(variables):
    """Copies, because torch would hand out its own memory."""
    return [np.array(keras.ops.convert_to_numpy(v)) for v in variables]


def state(model):
    """All that training changes: weights, seeds, and the optimizer's variables."""
    return arrays(_variables(model))


def restore(model, saved):
    """Put a model back to what `state` returned."""
    for variable, value in zip(_variables(model), saved, strict=True):
        variable.assign(value)


def _variables(model):
    return [
        *model.trainable_variables,
        *model.non_trainable_variables,
        *model.optimizer.variables,
    ]


def assert_equal(actual, expected):
    """Bit for bit, NaN included."""
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, e)


def assert_close(actual, expected, rtol):
    """Relative to the largest entry of each array."""
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=0, atol=rtol * max(abs(e).max(), 1e-6))


def moved(new, old):
    """For each array, whether any of its entries is another."""
    return [(a != b).any() for a, b in zip(new, old, strict=True)]


def kinds(model):
    """The kind of block of each trainable variable, by its path."""
    optimizer = model.optimizer
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    return {
        v.path: type(block).__name__.removesuffix("Block").lower()
        for block in optimizer.blocks
        for v in block.variables
    }


def live_tensors():
    """The number of torch's tensors that are alive, and their bytes."""
    torch = pytest.importorskip("torch")
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about what it sees in passing
        tensors = [t for t in gc.get_objects() if isinstance(t, torch.Tensor)]
    return len(tensors), sum(t.nelement() * t.element_size() for t in tensors)
