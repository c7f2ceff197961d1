"""Vectors in parameter space: lists of tensors, one for each trainable variable."""

from keras import ops


def values(variables: list) -> list:
    """The present values of Keras variables, as plain tensors without a gradient."""
    return [ops.stop_gradient(ops.convert_to_tensor(v.value)) for v in variables]


def assign(variables: list, new: list, where=True) -> None:
    """Assign tensors to Keras variables, where a boolean scalar says so."""
    for variable, old, value in zip(variables, values(variables), new, strict=True):
        if value is not old:
            variable.assign(value if where is True else ops.where(where, value, old))


def dot(u: list, v: list):
    """Inner product of two vectors, accumulated in float32.

    Args:
        u: List of tensors.
        v: List of tensors of the same shapes.

    Returns:
        A float32 scalar.
    """
    total = ops.zeros((), "float32")
    for a, b in zip(u, v, strict=True):
        total = total + ops.sum(ops.cast(a, "float32") * ops.cast(b, "float32"))
    return total


def scale(c, v: list) -> list:
    """The vector `c * v`."""
    return [ops.cast(c, a.dtype) * a for a in v]


def axpy(c, u: list, v: list) -> list:
    """The vector `c * u + v`."""
    return [ops.cast(c, a.dtype) * a + b for a, b in zip(u, v, strict=True)]


def is_finite(v: list):
    """Whether every entry is finite, a boolean scalar."""
    finite = ops.cast(True, "bool")
    for a in v:
        finite = ops.logical_and(finite, ops.all(ops.isfinite(a)))
    return finite
