"""The problems of `panel.py`: a plain Keras model, its data and a target each."""

from collections.abc import Callable
from typing import NamedTuple

import datasets
import keras
import networks
import numpy as np

layers = keras.layers


class Problem(NamedTuple):
    """One problem.

    Attributes:
        build: `build(seed)` makes the model, not compiled.
        compiled: Arguments of `compile` beside the optimizer.
        x: Training inputs.
        y: Training targets.
        batch_size: Examples in a batch.
        target: The loss to reach, in evaluation mode on the first examples.
        steps: Steps of a full run.
        every: Steps between two measurements.
        share: Its time, in units of the mean over the panel.
    """

    build: Callable
    compiled: dict
    x: np.ndarray
    y: np.ndarray
    batch_size: int
    target: float
    steps: int
    every: int
    share: float


CATEGORIES = {"loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}
SQUARES = {"loss": "mse"}


def _pixels(count):
    return {
        "loss": keras.losses.BinaryCrossentropy(from_logits=True),
        "loss_weights": float(count),  # Keras takes the mean over the pixels
    }


def _mnist(path, count=20_000):
    (x, y), _, _ = datasets.load_mnist(path)
    return x[:count], y[:count]


RECTIFIERS = {"activation": "relu", "initializer": "glorot_uniform"}


def mnist_autoencoder(args):
    """Martens' deep autoencoder: tanh, sparse initialisation."""
    x, _ = _mnist(args.data)

    def build(seed):
        return networks.autoencoder(x.shape[1], seed)

    return Problem(build, _pixels(x.shape[1]), x, x, 500, 90.0, 1000, 20, 2.0)


def mnist_autoencoder_relu(args):
    """The same widths with rectifiers and Glorot's initialisation."""
    x, _ = _mnist(args.data)

    def build(seed):
        return networks.autoencoder(x.shape[1], seed, **RECTIFIERS)

    return Problem(build, _pixels(x.shape[1]), x, x, 200, 90.0, 1500, 25, 1.5)


def curves_autoencoder(args):
    """Hinton and Salakhutdinov's CURVES, sigmoid units, sparse initialisation."""
    x = datasets.curves(10_000)

    def build(seed):
        widths = (400, 200, 100, 50, 25)
        return networks.autoencoder(784, seed, widths, 6, "sigmoid")

    return Problem(build, _pixels(784), x, x, 500, 130.0, 1000, 20, 1.5)


def _classifier(args, batch_size, steps, every):
    x, y = _mnist(args.data)

    def build(seed):
        return networks.classifier(x.shape[1])

    return Problem(build, CATEGORIES, x, y, batch_size, 0.03, steps, every, 0.75)


def mnist_classifier_32(args):
    """A classifier with rectifiers at Keras's default batch."""
    return _classifier(args, 32, 4000, 100)


def mnist_classifier_512(args):
    """The same at a batch of 512."""
    return _classifier(args, 512, 800, 20)


def cifar_convolutions(args):
    """Three convolutions with batch normalisation and dropout."""
    (x, y), _, _ = datasets.load_cifar10(args.cifar)

    def build(seed):
        return networks.convolutional_network(x.shape[1:])

    return Problem(build, CATEGORIES, x[:12_000], y[:12_000], 128, 0.9, 800, 20, 1.5)


def character_transformer(args):
    """Two blocks of attention that learn to add numbers of two digits."""
    generator = np.random.default_rng(0)
    sums = generator.integers(10, 100, (20_000, 2))
    text = "".join(f"{a}+{b}={a + b}\n" for a, b in sums)
    alphabet = {c: i for i, c in enumerate(sorted(set(text)))}
    ids = np.array([alphabet[c] for c in text], "int32")
    ids = ids[: len(ids) // 33 * 33].reshape(-1, 33)

    def build(seed):
        return networks.character_transformer(32, len(alphabet))

    return Problem(build, CATEGORIES, ids[:, :-1], ids[:, 1:], 64, 1.15, 1000, 20, 1.0)


def tabular_regression(args):
    """Diabetes progression from ten columns, in the units they were measured in."""
    from sklearn.datasets import load_diabetes

    x, y = load_diabetes(return_X_y=True, scaled=False)

    def build(seed):
        hidden = [layers.Dense(50, "relu") for _ in range(2)]
        return keras.Sequential([keras.Input((10,)), *hidden, layers.Dense(1)])

    x, y = x.astype("float32"), y[:, None].astype("float32")
    return Problem(build, SQUARES, x, y, 64, 3000.0, 4000, 50, 0.25)


def smooth_function(args):
    """A narrow tanh network that fits a smooth function of the plane, full batch."""
    x = np.random.default_rng(0).uniform(-1, 1, (1000, 2)).astype("float32")
    y = np.sin(3 * x[:, :1]) * np.cos(2 * x[:, 1:]) + 0.5 * x[:, :1] * x[:, 1:]

    def build(seed):
        hidden = [layers.Dense(50, "tanh") for _ in range(4)]
        return keras.Sequential([keras.Input((2,)), *hidden, layers.Dense(1)])

    return Problem(build, SQUARES, x, y, 1000, 1e-6, 8000, 100, 0.5)


def lstm_addition(args):
    """The sum of the two marked numbers of a sequence, by an LSTM."""
    generator = np.random.default_rng(0)
    x = np.zeros((10_000, 30, 2), "float32")
    x[:, :, 0] = generator.random(x.shape[:2])
    rows, half = np.arange(len(x)), len(x[0]) // 2
    for start in (0, half):
        x[rows, start + generator.integers(0, half, len(x)), 1] = 1.0
    y = np.sum(x[:, :, 0] * x[:, :, 1], axis=1, keepdims=True)

    def build(seed):
        return keras.Sequential(
            [keras.Input(x.shape[1:]), layers.LSTM(32), layers.Dense(1)]
        )

    return Problem(build, SQUARES, x, y, 128, 2e-3, 3000, 50, 0.75)


def squared_error(x, logits):
    """Mean over the images of the squared difference, summed over the pixels."""
    return keras.ops.mean(
        keras.ops.sum((keras.ops.sigmoid(logits) - x) ** 2, axis=-1)
    )


def _whole_autoencoder(args, **options):
    x, _ = _mnist(args.data, 60_000)

    def build(seed):
        return networks.autoencoder(x.shape[1], seed, **options)

    compiled = _pixels(x.shape[1]) | {"metrics": [squared_error]}
    return Problem(build, compiled, x, x, 1000, 2.0, 30_000, 60, 1.5)


def whole_autoencoder(args):
    """Martens' autoencoder on all images, to a squared error of 2.0; for a GPU."""
    return _whole_autoencoder(args)


def whole_autoencoder_relu(args):
    """The same with rectifiers and Glorot's initialisation; for a GPU."""
    return _whole_autoencoder(args, **RECTIFIERS)


LARGE = {f.__name__: f for f in (whole_autoencoder, whole_autoencoder_relu)}
PROBLEMS = {
    f.__name__: f
    for f in (
        mnist_autoencoder,
        mnist_autoencoder_relu,
        curves_autoencoder,
        mnist_classifier_32,
        mnist_classifier_512,
        cifar_convolutions,
        character_transformer,
        tabular_regression,
        smooth_function,
        lstm_addition,
    )
}
