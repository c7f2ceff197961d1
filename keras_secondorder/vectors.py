"""Vectors in parameter space: lists of tensors, one for each trainable variable."""

import functools
import math

import keras
from keras import ops

from keras_secondorder import autodiff


def values(variables: list) -> list:
    """The present values of Keras variables, as plain tensors without a gradient."""
    return [ops.stop_gradient(ops.convert_to_tensor(v.value)) for v in variables]


def assign(variables: list, new: list, where=True) -> None:
    """Assign tensors to Keras variables, where a boolean scalar says so."""
    if where is not True and keras.backend.backend() == "torch":  # known at once
        if not where:
            return
        where = True
    for variable, value in zip(variables, new, strict=True):
        if where is not True:
            value = ops.where(where, value, *values([variable]))
        variable.assign(value)


def choose(condition, new, old):
    """A nest of tensors, or another one; without a copy where a backend allows it.

    Args:
        condition: A boolean scalar.
        new: A function that gives the one to take where it is true.
        old: The other, of the same structure.
    """
    if keras.backend.backend() == "jax":  # XLA writes over what it chose from
        return keras.tree.map_structure(
            lambda n, o: ops.where(condition, n, o), new(), old
        )
    return ops.cond(condition, new, lambda: old)


def dot(u: list, v: list):
    """Inner product of two vectors, in float32 unless one is in float64.

    Args:
        u: List of tensors.
        v: List of tensors of the same shapes.

    Returns:
        A scalar.
    """
    dtype = precision_of([*u, *v])
    total = 0.0
    for a, b in zip(u, v, strict=True):
        total = total + autodiff.inner(cast(a, dtype), cast(b, dtype))
    return total if u else ops.zeros((), dtype)


def norm(v: list):
    """The Euclidean norm of a vector, a scalar."""
    return ops.sqrt(dot(v, v))


def cosine(u: list, v: list):
    """The cosine of the angle between two vectors, a scalar; 0 where one is zero."""
    return ops.divide_no_nan(dot(u, v), norm(u) * norm(v))


def scale(c, v: list) -> list:
    """The vector `c * v`."""
    return [cast(c, a.dtype) * a for a in v]


def axpy(c, u: list, v: list) -> list:
    """The vector `c * u + v`."""
    return [cast(c, a.dtype) * a + b for a, b in zip(u, v, strict=True)]


def is_finite(v: list):
    """Whether the sum of every tensor is finite, a boolean scalar.

    One entry that is not finite shows in the sum, which takes one pass and, unlike the
    norm, does not overflow before the entries do.
    """
    if not v:
        return ops.cast(True, "bool")
    dtype = precision_of(v)
    sums = [ops.sum(cast(a, dtype)) for a in v]
    return ops.all(ops.isfinite(ops.stack(sums)))


def take_rows(tree, rows):
    """Some examples of a nest of tensors; a None stays one.

    Args:
        tree: Nest of tensors with the examples as their first axis.
        rows: Indices of examples.
    """
    return keras.tree.map_structure(
        lambda t: None if t is None else ops.take(t, rows, axis=0), tree
    )


def copies(tree):
    """A nest of arrays or tensors with a copy of each; a None stays one.

    On PyTorch, Keras multiplies sample weights by a mask in place.
    """
    return keras.tree.map_structure(lambda t: None if t is None else ops.copy(t), tree)


def precision_of(tensors: list) -> str:
    """The dtype to compute in: "float64" where a tensor has it, else "float32"."""
    double = any(_name(t.dtype) == "float64" for t in tensors)
    return "float64" if double else "float32"


def cast(t, dtype):
    """A tensor or number in some dtype; the tensor itself where it has it."""
    if _name(getattr(t, "dtype", None)) == _name(dtype):
        return t
    return ops.cast(t, dtype)


@functools.cache
def _name(dtype):
    return None if dtype is None else keras.backend.standardize_dtype(dtype)


def flatten(v: list, dtype: str):
    """One vector of shape `(n,)` with the entries of all tensors, in order."""
    return ops.concatenate([ops.reshape(ops.cast(a, dtype), (-1,)) for a in v])


def unflatten(flat, shapes: list) -> list:
    """Tensors of some shapes, cut out of a vector; the inverse of `flatten`."""
    v, start = [], 0
    for shape in shapes:
        size = math.prod(shape)
        v.append(ops.reshape(flat[start : start + size], shape))
        start += size
    return v
