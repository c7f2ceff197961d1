"""Second moments of the gradients of single examples, along a Kronecker basis."""

import math

from keras import ops

from keras_secondorder.curvature.eigenbasis import coordinates, flipped, rotated

# Numbers in the gradients of single examples that are held at a time: 16 MiB.
AT_A_TIME = 2**22


def squared_gradients(a, g, bases: tuple, sides: tuple):
    """`sum_n (U_A^T (sum_t a_nt g_nt^T) U_G)^2`, squared by entry.

    Where an example has one position, its gradient has rank one and its square is that
    of its two vectors: `(A^2)^T G^2` for all examples. Otherwise the gradients of some
    examples at a time are formed.

    Args:
        a: Input rows, `(N, T, d_in)` or `(stack, N, T, d_in)`.
        g: Gradient rows, `(N, T, d_out)` or with the stack.
        bases: `(U_A, U_G)`.
        sides: The forms of the two factors.

    Returns:
        Shape `(d_in, d_out)`, or with the stack; the padding counts.

    References:
        George et al. (2018), section 3.1.
    """
    positions = ops.shape(a)[-2]

    def at_one():
        rows = [
            rotated(r[..., 0, :], basis, side) ** 2
            for r, basis, side in zip((a, g), bases, sides, strict=True)
        ]
        return ops.matmul(flipped(rows[0]), rows[1])

    def at_several():
        return _at_several(a, g, bases, sides)

    if isinstance(positions, int):
        return at_one() if positions == 1 else at_several()
    return ops.cond(ops.equal(positions, 1), at_one, at_several)


def _at_several(a, g, bases, sides):
    if sides[0].stack > 1:  # the examples first
        a, g = ops.swapaxes(a, 0, 1), ops.swapaxes(g, 0, 1)
    (p, q), T = (side.blocks * side.width for side in sides), a.shape[-2]
    # A rotation of the gradient takes p q (p + q) products, that of its rows the other.
    rows_first = T is None or T * (p * p + q * q) < p * q * (p + q)
    lead = () if sides[0].stack == 1 else (sides[0].stack,)

    def squares(a, g):
        if rows_first:
            a, g = rotated(a, bases[0], sides[0]), rotated(g, bases[1], sides[1])
        gradients = ops.matmul(flipped(a), g)
        if not rows_first:
            gradients = coordinates(gradients, bases, sides)
        return ops.sum(gradients**2, axis=0)

    return sum_over_examples(squares, (a, g), (*lead, p, q))


def squared_one_hot_gradients(indices, g, bases: tuple, sides: tuple):
    """The same for one-hot rows, of which row v has the gradients of its positions.

    Args:
        indices: Integers, shape `(N, T)`.
        g: Gradient rows, `(N, T, d_out)`.
        bases: `(U_A, U_G)`; `U_A` is the identity.
        sides: The forms of the two factors.

    Returns:
        Shape `(d_in, d_out)`; the padding counts.
    """
    g = rotated(g, bases[1], sides[1])
    size, T = sides[0].size, indices.shape[1]

    def squares(indices, g):
        same = ops.equal(indices[:, :, None], indices[:, None, :])
        # Of every position, what all positions of its example with its entry add up to.
        total = ops.matmul(ops.cast(same, g.dtype), g)
        return ops.segment_sum(
            ops.reshape(g * total, (-1, g.shape[-1])),
            ops.reshape(indices, (-1,)),
            num_segments=size,
        )

    shape = (size, g.shape[-1])
    return sum_over_examples(squares, (indices, g), shape, T and T * (T + shape[1]))


def sum_over_examples(function, rows: tuple, shape: tuple, numbers: int | None = None):
    """`function(rows)`, a sum over the examples, of a bounded number at a time.

    Args:
        function: Takes rows `(n, ...)`, gives a tensor; rows of zeros add nothing.
        rows: Tensors with the examples first.
        shape: Shape of the result.
        numbers: How many numbers `function` makes of one example; those of the result
            by default.
    """
    at_a_time = max(1, AT_A_TIME // (numbers or math.prod(shape)))
    examples = ops.shape(rows[0])[0]
    if isinstance(examples, int) and examples <= at_a_time:
        return function(*rows)
    times = -(-examples // at_a_time)
    missing = times * at_a_time - examples

    def padded(r):
        zeros = ops.zeros((missing, *ops.shape(r)[1:]), dtype=r.dtype)
        return ops.concatenate([r, zeros], axis=0)

    rows = [padded(r) for r in rows]

    def add(i, total):
        start = i * at_a_time
        some = [
            ops.slice(
                r,
                (start, *[0] * (len(r.shape) - 1)),
                (at_a_time, *ops.shape(r)[1:]),
            )
            for r in rows
        ]
        return total + function(*some)

    return ops.fori_loop(0, times, add, ops.zeros(shape, rows[-1].dtype))
