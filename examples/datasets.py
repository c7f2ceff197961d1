"""MNIST for the examples: from a file, Keras's cache, the network or a stand-in."""

import contextlib
import io
import os
import pathlib
import threading
import urllib.request

import numpy as np

MNIST_HOST = "https://storage.googleapis.com/tensorflow/tf-keras-datasets/mnist.npz"
DIGITS_NAME = "scikit-learn's digits (8x8, a stand-in for MNIST)"


def load_mnist(path=None):
    """Loads MNIST, or scikit-learn's digits on a machine that can't get it.

    Looked up in this order: `path`, Keras's cache, the network, scikit-learn's digits.
    The digits stay 8x8, so take the input size from the data.

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
    if path == "digits":
        return _digits()
    if path is not None:
        return _read(pathlib.Path(path).expanduser())
    home = pathlib.Path(os.environ.get("KERAS_HOME", "~/.keras")).expanduser()
    cached = home / "datasets" / "mnist.npz"
    if cached.exists():
        return _read(cached)
    return _download() or _digits()


def _read(path):
    """Reads a file in Keras's layout."""
    with np.load(path, allow_pickle=False) as file:
        train = file["x_train"], file["y_train"]
        test = file["x_test"], file["y_test"]
    return _flat(*train, 255.0), _flat(*test, 255.0), f"MNIST ({path.name})"


def _flat(x, y, scale):
    """Scales images to [0, 1] and flattens them."""
    x = x.reshape(len(x), -1).astype("float32") / np.float32(scale)
    return x, y.reshape(-1).astype("int32")


def _download(seconds=4.0):
    """Fetches MNIST through Keras; `None` if the server does not answer in time."""
    answered = threading.Event()

    def ask():
        request = urllib.request.Request(MNIST_HOST, method="HEAD")
        with contextlib.suppress(OSError, ValueError):
            with urllib.request.urlopen(request, timeout=seconds):
                answered.set()

    # In a thread, because looking up a host name has no time limit of its own.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    if not answered.is_set():
        return None

    import keras

    try:
        with contextlib.redirect_stdout(io.StringIO()):
            train, test = keras.datasets.mnist.load_data()
    except Exception:  # Keras raises a bare Exception when a download fails.
        return None
    return _flat(*train, 255.0), _flat(*test, 255.0), "MNIST (downloaded)"


def _digits():
    """The 1,797 digits of scikit-learn: 1,500 to train on, the rest to test."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    train, test = order[:1500], order[1500:]
    return _flat(x[train], y[train], 16.0), _flat(x[test], y[test], 16.0), DIGITS_NAME


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
