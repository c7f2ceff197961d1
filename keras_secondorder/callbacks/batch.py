"""The fixed batch that a monitor looks at."""

import inspect

import keras
import numpy as np
from keras import ops


def arguments_of_fit(model):
    """The data that the running `fit` of a model was given, or None.

    Keras shows a callback no data. They are among the arguments of the `fit` that calls
    it, which Python shows. Only arrays are of use: to read a data set, were it by one
    batch, can change what training sees.

    Args:
        model: The model that is being trained.

    Returns:
        `(x, y, sample_weight)`, or None outside of `fit`.
    """
    frame = inspect.currentframe()
    while frame is not None:
        local = frame.f_locals
        if frame.f_code.co_name == "fit" and local.get("self") is model:
            return local.get("x"), local.get("y"), local.get("sample_weight")
        frame = frame.f_back
    return None


def first_rows(data, rows: int):
    """The first rows of `(x, y)` or `(x, y, sample_weight)`.

    Args:
        data: Nests of arrays, or None.
        rows: Most of them.

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
    return keras.tree.map_structure(
        lambda t: None if t is None else np.array(ops.convert_to_numpy(t[:rows])), data
    )
