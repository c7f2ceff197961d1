"""The eigenvectors of factors, and tensors as coordinates along them.

A basis has the shape of its factor: one orthogonal matrix for each diagonal block of
each matrix of the stack, eigenvectors as columns. Coordinates count the padding of the
last block, which stays zero; a diagonal factor is its own eigenbasis.
"""

from keras import ops

from keras_secondorder.autodiff import symmetric_eigh
from keras_secondorder.capture import Side
from keras_secondorder.curvature.factor import TINY


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
    return flipped(along(flipped(V), bases[1], sides[1]))


def from_coordinates(V, bases: tuple, sides: tuple):
    """`U_A V U_G^T`, the inverse of `coordinates`."""
    V = _back(V, bases[0], sides[0])
    return flipped(_back(flipped(V), bases[1], sides[1]))


def rotated(rows, basis, side: Side):
    """`rows @ U`, for rows of shape `(..., k, size)`."""
    return flipped(along(flipped(rows), basis, side))


def along(V, basis, side: Side):
    """`U^T V`, for V of shape `(..., size, k)`."""
    missing = side.blocks * side.width - side.size
    if missing:
        V = ops.pad(V, [(0, 0)] * (len(V.shape) - 2) + [(0, missing), (0, 0)])
    return _multiply(flipped(basis), V, side)


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


def flipped(V):
    """The transposes."""
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
    squares = [ops.matmul(flipped(U), V) ** 2 for U, V in zip(old, new, strict=True)]
    return coordinates(moments, squares, padded)
