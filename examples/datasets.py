"""MNIST and CIFAR-10 for the examples: from a file, a cache, the network or a stand-in.

`load_mnist` and `load_cifar10` look in this order: at the `path` they are given, in
Keras's cache, on the network, and, on a machine that can get neither, in scikit-learn's
digits. The digits stay 8x8, so take the input size from the data.
"""

import contextlib
import io
import os
import pathlib
import threading
import urllib.request

import numpy as np

MNIST = "https://storage.googleapis.com/tensorflow/tf-keras-datasets/mnist.npz"
CIFAR10 = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"


def load_mnist(path=None):
    """Loads MNIST.

    Args:
        path: An .npz file in Keras's layout (x_train, y_train, x_test, y_test), or
            "digits" for the stand-in, or `None` for the search.

    Returns:
        `(x_train, y_train), (x_test, y_test), name`. The images are float32 in [0, 1]
        and flat, (examples, pixels); the labels are int32; the name says which data
        these are.

    Raises:
        FileNotFoundError: If `path` is given and there is no such file.
    """
    (x, y), (x_test, y_test), name = _find(path, "MNIST", "mnist", "mnist.npz", MNIST)
    top = np.float32(16.0 if x.shape[1] == 8 else 255.0)

    def flat(images):
        return images.reshape(len(images), -1).astype("float32") / top

    return (flat(x), y), (flat(x_test), y_test), name


def load_cifar10(path=None):
    """Loads CIFAR-10.

    Args:
        path: An .npz file in Keras's layout (x_train, y_train, x_test, y_test), or
            "digits" for the stand-in, or `None` for the search.

    Returns:
        `(x_train, y_train), (x_test, y_test), name`. The images are float32 of shape
        (examples, height, width, channels), each channel with mean 0 and variance 1
        over the training images; the labels are int32; the name says which data these
        are.

    Raises:
        FileNotFoundError: If `path` is given and there is no such file.
    """
    (x, y), (x_test, y_test), name = _find(
        path, "CIFAR-10", "cifar10", "cifar-10-batches-py-target", CIFAR10
    )
    x, x_test = (a.reshape(*a.shape[:3], -1).astype("float32") for a in (x, x_test))
    mean, deviation = x.mean((0, 1, 2)), x.std((0, 1, 2))
    return ((x - mean) / deviation, y), ((x_test - mean) / deviation, y_test), name


def _find(path, title, module, cached, address):
    """Images as they are stored, labels, and a name, for training and for testing."""
    home = pathlib.Path(os.environ.get("KERAS_HOME", "~/.keras")).expanduser()
    found = None
    if path == "digits":
        pass
    elif path is not None:
        path = pathlib.Path(path).expanduser()
        with np.load(path, allow_pickle=False) as file:
            train = file["x_train"], file["y_train"]
            found = train, (file["x_test"], file["y_test"]), f"{title} ({path.name})"
    elif (home / "datasets" / cached).exists() or _answers(address):
        found = _from_keras(module, title)
    train, test, name = found or _digits(title)
    return *((x, y.reshape(-1).astype("int32")) for x, y in (train, test)), name


def _answers(address, seconds=4.0):
    """Whether the server of an address answers in time."""
    answered = threading.Event()

    def ask():
        request = urllib.request.Request(address, method="HEAD")
        with contextlib.suppress(OSError, ValueError):
            with urllib.request.urlopen(request, timeout=seconds):
                answered.set()

    # In a thread, because looking up a host name has no time limit of its own.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return answered.is_set()


def _from_keras(module, title):
    """Keras's own loader; `None` if it fails."""
    import keras

    try:
        with contextlib.redirect_stdout(io.StringIO()):
            train, test = getattr(keras.datasets, module).load_data()
    except Exception:  # Keras raises a bare Exception when a download fails.
        return None
    return train, test, f"{title} (of keras.datasets)"


def _digits(title):
    """The 1,797 digits of scikit-learn: 1,500 to train on, the rest to test."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.images))
    train, test = (
        (digits.images[rows], digits.target[rows])
        for rows in (order[:1500], order[1500:])
    )
    return train, test, f"scikit-learn's digits (8x8, a stand-in for {title})"


def curves(count, seed=0, side=28):
    """Draws the CURVES images: one smooth curve through three random points in each.

    In the style of Hinton and Salakhutdinov (2006): the parabola through the three
    points, drawn with a round pen. Six numbers make an image, which is what a code
    layer of six units can find.

    Args:
        count: Number of images.
        seed: Seed of the points.
        side: Height and width of an image.

    Returns:
        Images as float32 in [0, 1] and flat, (count, side * side).
    """
    generator = np.random.default_rng(seed)
    t = np.linspace(0.0, 1.0, 60)[:, None, None]
    pixels = np.arange(side)
    images = np.empty((count, side, side), "float32")
    for start in range(0, count, 500):
        points = generator.uniform(0.12, 0.88, (3, min(500, count - start), 2)) * side
        # Lagrange's parabola: at t = 0, 1/2 and 1 it is at the first, second and third.
        path = (
            (2 * t - 1) * (t - 1) * points[0]
            + 4 * t * (1 - t) * points[1]
            + t * (2 * t - 1) * points[2]
        )  # (60, images, 2)
        near = [
            np.exp(-0.5 * ((pixels - path[..., axis, None]) / 0.8) ** 2)
            for axis in (0, 1)
        ]
        ink = np.einsum("tni,tnj->tnij", *near)
        images[start : start + 500] = ink.max(axis=0)
    return images.reshape(count, -1)
