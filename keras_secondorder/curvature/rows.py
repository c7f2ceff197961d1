"""Rows of a layer, `(..., examples, positions, features)`, with their weights."""

from keras import ops


def input_rows(part, inputs: list, weights):
    """`(..., N, T, d_in)`, all calls in a row; indices `(N, T, 1)` if one-hot.

    Args:
        part: The wrapper of an affine map.
        inputs: The layer's inputs as recorded, one for each call.
        weights: Weights of the examples; only their number is used.
    """
    a = [part.input_rows(x) for x in inputs]
    if part.one_hot:
        a = [indices[..., None] for indices in a]
    return _joined([by_example(r, weights) for r in a])


def gradient_rows(part, taps: list, weights):
    """`(..., N, T, d_out)`, all calls in a row.

    Args:
        part: The wrapper of an affine map.
        taps: Gradients at the layer's pre-activations, one for each call.
        weights: Weights of the examples; only their number is used.
    """
    return _joined([by_example(part.gradient_rows(t), weights) for t in taps])


def _joined(rows: list):
    """The positions of all calls beside one another."""
    return ops.concatenate(rows, axis=-2) if len(rows) > 1 else rows[0]


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
