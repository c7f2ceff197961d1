"""The fixed batch that a monitor looks at."""

import inspect

import keras
import numpy as np
from keras import ops

from keras_secondorder.arguments import check_rows


def arguments_of_fit(model):
    """The data that the running `fit` of a model was given, or None.

    Keras shows a callback no data. They are among the arguments of the `fit` that calls
    it, which Python shows. Only arrays are of use: to read a data set, were it by one
    batch, can change what training sees.

    Args:
        model: The model that is being trained.

    Returns:
        `(x, y, sample_weight)` and the weights of the classes, a dictionary or None;
        `(None, None)` outside of `fit`.
    """
    frame = inspect.currentframe()
    while frame is not None:
        local = frame.f_locals
        if frame.f_code.co_name == "fit" and local.get("self") is model:
            data = local.get("x"), local.get("y"), local.get("sample_weight")
            return data, local.get("class_weight")
        frame = frame.f_back
    return None, None


def check_data(data) -> None:
    """Refuse what is no `(x, y)` or `(x, y, sample_weight)` of arrays.

    Args:
        data: What was given for it.

    Raises:
        ValueError: It has another structure, or numbers of rows that differ.
    """
    if not isinstance(data, tuple | list) or len(data) not in (2, 3):
        count = f" of {len(data)}" if isinstance(data, tuple | list) else ""
        raise ValueError(
            "`data` must be `(x, y)` or `(x, y, sample_weight)`. Received a "
            f"{type(data).__name__}{count}."
        )
    check_rows("data", data)


def misfit(model, batch) -> str | None:
    """Why a model cannot be shown a batch, where that is plain to see.

    Args:
        model: A compiled and built model.
        batch: `(x, y, sample_weight)`, or None.

    Returns:
        A clause, or None.
    """
    if batch is None:
        return "there are no arrays with two rows or more"
    x, y, _ = batch
    if y is None and getattr(model, "loss", None) is not None:
        return "there are no targets for the loss"
    given = list(x) if isinstance(x, tuple | list) else [x]
    inputs = getattr(model, "inputs", None) or []
    for array, wanted in zip(given, inputs, strict=False):
        shape, right = getattr(array, "shape", ()), wanted.shape
        sizes = zip(shape[1:], right[1:], strict=False)
        # Keras adds or drops an axis of size 1.
        if len(shape) == len(right) and any(m not in (None, n) for n, m in sizes):
            return f"inputs of shape {shape} do not fit the model's {right}"
    return None


def first_rows(data, rows: int, class_weight: dict | None = None):
    """The first rows of `(x, y)` or `(x, y, sample_weight)`.

    Args:
        data: Nests of arrays, or None.
        rows: Most of them.
        class_weight: Weights of the classes, which become weights of the examples as in
            `fit`; a class that is not named weighs 1.

    Returns:
        `(x, y, sample_weight)` as NumPy arrays; None for data that are no arrays, or
        have a single row.
    """
    if data is None:
        return None
    data = (*data, *[None] * (3 - len(data)))
    flat = [t for t in keras.tree.flatten(data) if t is not None]
    if not flat or not all(getattr(t, "shape", ()) for t in flat):
        return None
    if min(len(t) for t in flat) < 2:
        return None
    x, y, weights = keras.tree.map_structure(
        lambda t: None if t is None else np.array(ops.convert_to_numpy(t[:rows])), data
    )
    if class_weight is not None and y is not None:
        weights = _weights_of(y, class_weight)
    return x, y, weights


def _weights_of(y, class_weight: dict):
    """The weight of each example by its class, a number or one-hot."""
    if y.ndim > 1:
        y = y[..., 0] if y.shape[-1] == 1 else np.argmax(y, axis=-1)
    weights = [class_weight.get(int(c), 1.0) for c in np.round(y)]
    return np.array(weights, keras.config.floatx())
