"""The eigenvectors of factors, and tensors as coordinates along them.

A basis has the shape of its factor: one orthogonal matrix for each diagonal block of
each matrix of the stack, eigenvectors as columns. Coordinates count the padding of the
last block, which stays zero; a diagonal factor is its own eigenbasis.
"""

from keras import ops

from keras_secondorder.autodiff import symmetric_eigh
from keras_secondorder.capture import Side
from keras_secondorder.curvature.factor import TINY

# Numbers in the gradients of single examples that are held at a time: 16 MiB.
AT_A_TIME = 2**22


def eigenbases(factors: list, compiled: bool = False) -> list:
    """The eigenvalues and eigenvectors of factors.

    An input or unit that was always zero has eigenvectors to itself, which no rounding
    mixes with others: what is zero along it stays exactly zero.

    Args:
        factors: Symmetric positive semi-definite matrices, shape `(d, d)` each, or
            stacks of them, shape `(k, d, d)`.
        compiled: Whether the step runs inside XLA.

    Returns:
        `(values, vectors)` for each factor, of shapes `(..., d)` and `(..., d, d)`; NaN
        where the decomposition failed.
    """
    scaled, scales, dead = [], [], []
    for factor in factors:
        diagonal = ops.diagonal(factor, axis1=-2, axis2=-1)
        scale = ops.mean(diagonal, axis=-1)[..., None] + TINY
        # Far from all eigenvalues, so that the two kinds do not mix.
        zero = ops.cast(diagonal <= 0, factor.dtype)
        apart = zero[..., None] * ops.eye(factor.shape[-1], dtype=factor.dtype)
        scaled.append(factor / scale[..., None] - apart)
        scales.append(scale)
        dead.append(zero)
    solved = iter(symmetric_eigh([m for m in scaled if m.shape[-1] > 1], compiled))
    results = []
    for matrix, scale, zero in zip(scaled, scales, dead, strict=True):
        if matrix.shape[-1] == 1:
            values, basis = matrix[..., 0], ops.ones_like(matrix)
        else:
            values, basis = next(solved)
            alone = ops.cast(values < -0.5, basis.dtype)
            mixed = ops.abs(zero[..., :, None] - alone[..., None, :])
            basis = basis * (1.0 - mixed)
        results.append((ops.relu(values) * scale, basis))
    return results


def coordinates(V, bases: tuple, sides: tuple):
    """`U_A^T V U_G`, for V of shape `(..., d_in, d_out)`.

    Args:
        V: A matrix, a stack of them, or any number of such.
        bases: `(U_A, U_G)`.
        sides: The forms of the two factors.
    """
    V = along(V, bases[0], sides[0])
    return _flipped(along(_flipped(V), bases[1], sides[1]))


def from_coordinates(V, bases: tuple, sides: tuple):
    """`U_A V U_G^T`, the inverse of `coordinates`."""
    V = _back(V, bases[0], sides[0])
    return _flipped(_back(_flipped(V), bases[1], sides[1]))


def along(V, basis, side: Side):
    """`U^T V`, for V of shape `(..., size, k)`."""
    missing = side.blocks * side.width - side.size
    if missing:
        V = ops.pad(V, [(0, 0)] * (len(V.shape) - 2) + [(0, missing), (0, 0)])
    return _multiply(_flipped(basis), V, side)


def _back(V, basis, side: Side):
    """`U V`, without the padding."""
    V = _multiply(basis, V, side)
    return V if side.blocks == 1 else V[..., : side.size, :]


def _multiply(matrices, V, side: Side):
    if side.width == 1:  # the identity
        return V
    if side.blocks == 1:
        return ops.matmul(matrices, V)
    shape = ops.shape(V)
    lead = () if side.stack == 1 else (side.stack,)
    matrices = ops.reshape(matrices, (*lead, side.blocks, side.width, side.width))
    V = ops.reshape(V, (*shape[:-2], side.blocks, side.width, shape[-1]))
    return ops.reshape(ops.matmul(matrices, V), shape)


def _flipped(V):
    return ops.swapaxes(V, -1, -2)


def moved(moments, old: tuple, new: tuple, sides: tuple):
    """The diagonal, in a new basis, of the matrix that is diagonal in an old one.

    ```
    diag(U'^T U diag(s) U^T U')  =  (Q_A^2)^T S Q_G^2,   Q = U^T U', squared by entry
    ```

    Args:
        moments: `S`, the diagonal, of shape `(d_in, d_out)` or a stack.
        old: `(U_A, U_G)`.
        new: `(U_A', U_G')`.
        sides: The forms of the two factors.
    """
    padded = [side._replace(size=side.blocks * side.width) for side in sides]
    squares = [ops.matmul(_flipped(U), V) ** 2 for U, V in zip(old, new, strict=True)]
    return coordinates(moments, squares, padded)


# --- second moments of the gradients of single examples ------------------------------


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
            _rotated(r[..., 0, :], basis, side) ** 2
            for r, basis, side in zip((a, g), bases, sides, strict=True)
        ]
        return ops.matmul(_flipped(rows[0]), rows[1])

    def at_several():
        return _at_several(a, g, bases, sides)

    if isinstance(positions, int):
        return at_one() if positions == 1 else at_several()
    return ops.cond(ops.equal(positions, 1), at_one, at_several)


def _rotated(rows, basis, side: Side):
    """`rows @ U`, for rows of shape `(..., k, size)`."""
    return _flipped(along(_flipped(rows), basis, side))


def _at_several(a, g, bases, sides):
    if sides[0].stack > 1:  # the examples first
        a, g = ops.swapaxes(a, 0, 1), ops.swapaxes(g, 0, 1)
    (p, q), T = (side.blocks * side.width for side in sides), a.shape[-2]
    # A rotation of the gradient takes p q (p + q) products, that of its rows the other.
    rows_first = T is None or T * (p * p + q * q) < p * q * (p + q)
    lead = () if sides[0].stack == 1 else (sides[0].stack,)

    def squares(a, g):
        if rows_first:
            a, g = _rotated(a, bases[0], sides[0]), _rotated(g, bases[1], sides[1])
        gradients = ops.matmul(_flipped(a), g)
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
    g = _rotated(g, bases[1], sides[1])
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
    size = 1
    for side in shape:
        size *= side
    at_a_time = max(1, AT_A_TIME // (numbers or size))
    examples = ops.shape(rows[0])[0]
    if isinstance(examples, int):
        if examples <= at_a_time:
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
