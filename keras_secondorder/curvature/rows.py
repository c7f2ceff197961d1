"""Rows of a layer, `(..., examples, positions, features)`, with their weights."""

from keras import ops


def by_example(rows, weights):
    """Rows `(..., N, T, d)` with the examples that the weights have.

    A model may have moved positions into the first axis, as in `(N T, d)`.
    """
    if weights.shape[0] is not None and rows.shape[-3] == weights.shape[0]:
        return rows
    lead = rows.shape[:-3]
    return ops.reshape(rows, (*lead, ops.shape(weights)[0], -1, rows.shape[-1]))


def spread(weights, rows):
    """Weights of the rows `(..., N, T, d)`, shape `(N, T)` or `(N, 1)`."""
    if weights.shape[1] == 1 or weights.shape[1] != rows.shape[-2]:
        weights = ops.sum(weights, axis=1, keepdims=True)
        weights = weights / ops.cast(ops.shape(rows)[-2], "float32")
    return weights


def all_rows(rows, stack: int):
    """`(stack, N, T, d)` as `(stack, N T, d)`, without the stack where it is 1."""
    lead = () if stack == 1 else (stack,)
    return ops.reshape(rows, (*lead, -1, rows.shape[-1]))
