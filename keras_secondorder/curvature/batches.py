"""The data of an operator: one batch of arrays, or an iterable of batches."""

from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
from keras import ops


class Batches:
    """Data as batches `(x, y, sample_weight)` of tensors, as often as wanted.

    Args:
        model: The compiled model that they are for.
        x: Inputs, or an iterable of batches.
        y: Targets, where `x` is an array.
        sample_weight: Weights, where `x` is an array.
        labelled: Whether targets are passed on.

    Raises:
        ValueError: The data cannot be read more than once, has no batches, is made of
            something else than arrays, or lacks targets that a loss needs.
    """

    def __init__(self, model, x, y, sample_weight, labelled=True):
        if x is None:
            raise ValueError("There are no inputs. Received x=None. Pass an array.")
        self.single = y is not None or _is_batch(model, x)
        if isinstance(x, tuple) and not self.single:
            raise ValueError(
                "A tuple may be meant as one batch (x, y) or as several batches. "
                f"Received one of {len(x)}. Pass `x` and `y` apart, or a list of "
                "batches."
            )
        self._labelled = labelled
        self._labels_missing = labelled and model.loss is not None
        self._source = [(x, y, sample_weight)] if self.single else x
        if self.single:
            return
        if iter(x) is x:
            raise ValueError(
                "An operator goes through its batches once for each product. Received "
                f"{type(x).__name__}, which can be read only once. Pass a data set, or "
                "a list of its batches."
            )
        if sample_weight is not None:
            raise ValueError(
                "Where `x` holds batches, the weights come with them. Received "
                "`sample_weight` beside them. Pass batches (x, y, sample_weight)."
            )

    def __iter__(self):
        empty = True
        for batch in items_of(self._source):
            empty = False
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(
                tuple(batch) if isinstance(batch, list | tuple) else batch
            )
            if self._labels_missing and y is None:
                raise ValueError(
                    "The loss needs targets. Received a batch without any. Pass `y`, "
                    "or use `fisher`, which does not depend on them."
                )
            y = y if self._labelled else None
            batch = keras.tree.map_structure(_as_tensor, (x, y, sample_weight))
            _check_rows(batch)
            if rows_of(batch) == 0:
                raise ValueError(
                    "A curvature is a mean over examples. Received a batch without "
                    "any. Pass at least one row."
                )
            yield batch
        if empty:
            raise ValueError("The data has no batches. Pass at least one.")


def items_of(source) -> Iterable:
    """The batches of a data set, of whatever kind."""
    if isinstance(source, keras.utils.PyDataset):
        return (source[i] for i in range(source.num_batches))
    return source


def _is_batch(model, x) -> bool:
    """Whether `x` holds arrays, rather than batches of them."""
    if isinstance(x, list | tuple):
        if len(getattr(model, "inputs", None) or ()) == 1:
            return False  # a list of inputs would be one for a model of several
        return not any(isinstance(item, list | tuple) for item in x)
    return isinstance(x, dict) or hasattr(x, "shape")


def _as_tensor(value: Any):
    if value is None:
        return None
    if not getattr(value, "shape", ()):
        raise ValueError(
            "Inputs, targets and weights are arrays with an axis of rows. Received "
            f"{value!r} among them. Make arrays of lists of numbers, by `np.array`."
        )
    if keras.ops.is_tensor(value):
        return value
    array = np.array(value)  # a copy, which nobody else changes
    if array.dtype.kind == "f":
        array = array.astype(keras.config.floatx())  # as `fit` does
    return ops.convert_to_tensor(array)


def _check_rows(batch) -> None:
    rows = {tuple(t.shape)[:1] for t in keras.tree.flatten(batch) if t is not None}
    if len(rows) > 1:
        shapes = keras.tree.map_structure(
            lambda t: None if t is None else tuple(t.shape), batch
        )
        raise ValueError(
            "Inputs, targets and weights must have as many rows as each other. "
            f"Received the shapes {shapes}. Pass the same examples."
        )


def rows_of(batch) -> int:
    """Number of examples in a batch."""
    first = next(t for t in keras.tree.flatten(batch[0]) if t is not None)
    return int(first.shape[0])
