"""Vectors of an operator in either form, flat or nested, as flat columns."""

import math
from collections.abc import Callable

from keras import ops

from keras_secondorder import vectors


def columns_of(v, shapes: list, dtype: str) -> tuple[list, Callable]:
    """Flat columns, and what gives results the form of `v`.

    Args:
        v: Flat, `(P,)` or `(P, k)`, or nested, with or without one more axis.
        shapes: Shapes of the tensors of a nested vector.
        dtype: Dtype of the columns.

    Returns:
        Tensors of shape `(P,)`, and a function of as many such tensors.

    Raises:
        TypeError: It is an operator.
        ValueError: It has none of these shapes.
    """
    if hasattr(v, "products"):
        raise TypeError(
            "An operator is multiplied by vectors. Received another operator, a "
            f"{type(v).__name__}. Apply one after the other: `A @ (B @ v)`."
        )
    if isinstance(v, list | tuple):
        return _nested([_tensor(part, dtype) for part in v], shapes, dtype)
    size, v = sum(math.prod(shape) for shape in shapes), _tensor(v, dtype)
    if tuple(v.shape) == (size,):
        return [v], lambda new: new[0]
    if len(v.shape) == 2 and v.shape[0] == size and v.shape[1] > 0:
        columns = [v[:, i] for i in range(v.shape[1])]
        return columns, lambda new: ops.stack(new, axis=1)
    raise ValueError(
        f"A flat vector must have shape ({size},), and several have ({size}, k). "
        f"Received shape {tuple(v.shape)}. Nested vectors are lists of tensors."
    )


def _nested(parts, shapes, dtype):
    given = [tuple(part.shape) for part in parts]
    if given == shapes:
        flat = vectors.flatten(parts, dtype)
        return [flat], lambda new: vectors.unflatten(new[0], shapes)
    stacked = len(given) == len(shapes) and all(
        g[:-1] == s for g, s in zip(given, shapes, strict=True)
    )
    if not stacked:
        raise ValueError(
            f"A nested vector must have tensors of shapes {shapes}, those of "
            f"the trainable variables. Received shapes {given}. Several vectors "
            "are stacked along one more axis at the end."
        )
    columns = [
        vectors.flatten([part[..., i] for part in parts], dtype)
        for i in range(given[0][-1])
    ]

    def rebuild(new):
        lists = [vectors.unflatten(flat, shapes) for flat in new]
        return [ops.stack(p, -1) for p in zip(*lists, strict=True)]

    return columns, rebuild


def _tensor(value, dtype):
    return ops.cast(ops.convert_to_tensor(value), dtype)
