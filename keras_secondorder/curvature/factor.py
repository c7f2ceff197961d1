"""One factor of a block, whatever its form: its statistics, and its products.

A factor is stored as its diagonal blocks: a matrix, or a stack `(blocks, w, w)` of all
blocks of all groups. Where the width does not divide the size, the last block of each
group is padded with zeros.
"""

from keras import ops

from keras_secondorder.autodiff import interpolate, spd_inverses
from keras_secondorder.capture import Side
from keras_secondorder.curvature.low_rank import LowRank, Subspace, low_ranks, traces

# pi outside this range says that a factor vanishes, not that it is small.
PI_RANGE = (1e-6, 1e6)
FLOAT32_EPS = 1.2e-7
TINY = 1e-30
LEAST_MEAN = 1e-16  # a mean eigenvalue below this says that a block has no curvature


def running_average(old, new, count, max_decay: float):
    """`eps old + (1 - eps) new` with `eps = min(1 - 1 / count, max_decay)`.

    With `count = 1` at the first batch the average starts as that batch's value.

    Args:
        old: The average so far.
        new: The value of this batch.
        count: Number of batches, this one included; a float scalar.
        max_decay: The largest weight of the past.

    References:
        Martens (2016), thesis, section 6.5.
    """
    return interpolate(old, new, 1.0 - past_weight(count, max_decay))


def past_weight(count, max_decay: float):
    """The `eps` of `running_average`."""
    return ops.minimum(1.0 - 1.0 / count, max_decay)


def second_moment(rows, side: Side):
    """`rows^T rows` within each diagonal block.

    Args:
        rows: Shape `(R, size)`, or `(stack, R, size)` for a stack.
        side: The form of the factor.

    Returns:
        The factor, of shape `side.shape`.
    """
    if side.width == 1:
        return ops.reshape(ops.sum(rows**2, axis=-2), side.shape)
    rows = _in_blocks(ops.swapaxes(rows, -1, -2), side)  # (..., width, R)
    return ops.matmul(rows, ops.swapaxes(rows, -1, -2))


def counts(indices, weights, side: Side):
    """The second moment of one-hot rows, which is diagonal.

    Args:
        indices: Integers of any shape.
        weights: Their weights, of the same shape.
        side: The form of the factor; diagonal.

    Returns:
        The factor, of shape `side.shape`.
    """
    flat = ops.reshape(indices, (-1,))
    total = ops.segment_sum(ops.reshape(weights, (-1,)), flat, num_segments=side.size)
    return ops.reshape(total, side.shape)


def multiply_left(inverse, V, side: Side):
    """`inverse @ V` for V of shape `(size, k)`, or `(stack, size, k)`."""
    if isinstance(inverse, LowRank):
        return inverse.left(V)[0]
    if side.width == 1:
        return ops.reshape(inverse, (*V.shape[:-1], 1)) * V
    product = ops.matmul(inverse, _in_blocks(V, side))
    if side.blocks == 1:
        return product
    padded = (*V.shape[:-2], side.blocks * side.width, V.shape[-1])
    return ops.reshape(product, padded)[..., : side.size, :]


def multiply_right(V, inverse, side: Side):
    """`V @ inverse` for V of shape `(k, size)`, or `(stack, k, size)`."""
    if isinstance(inverse, LowRank):
        return inverse.right(V)
    if side.blocks == 1:
        return ops.matmul(V, inverse)
    flipped = multiply_left(inverse, ops.swapaxes(V, -1, -2), side)
    return ops.swapaxes(flipped, -1, -2)


def _in_blocks(V, side: Side):
    """`(..., size, k)` as `(stack * blocks, width, k)`; as it is for a full side."""
    if side.blocks == 1:
        return V
    missing = side.blocks * side.width - side.size
    if missing:
        pads = [(0, 0)] * (len(V.shape) - 2) + [(0, missing), (0, 0)]
        V = ops.pad(V, pads)
    count = side.stack * side.blocks
    return ops.reshape(V, (count, side.width, V.shape[-1]))


def mean_eigenvalue(factor, side: Side):
    """Trace over size: a scalar, or one for each matrix of the stack."""
    if side.stack == 1:
        return ops.sum(traces(factor)) / side.size
    by_block = ops.reshape(traces(factor), (side.stack, side.blocks))
    return ops.sum(by_block, axis=-1) / side.size


def in_units_of(mean, damping, relative: bool):
    """What a damping is, in the units of a block's eigenvalues.

    Args:
        mean: The mean eigenvalue of the block.
        damping: `lambda`, a scalar.
        relative: Whether it is a share of that mean; of 1 where there is no curvature.
    """
    if not relative:
        return damping
    return damping * ops.where(mean > LEAST_MEAN, mean, 1.0)


def trace_norm_pi(A, G, sides: tuple | None = None):
    """`pi = sqrt((tr A / d_in) / (tr G / d_out))`, bounded where a trace is zero.

    `d_in` counts the bias. The factored damping adds `pi gamma` to A and `gamma / pi`
    to G.

    Args:
        A: Input factor.
        G: Gradient factor.
        sides: Their forms; full matrices by default.

    Returns:
        A scalar, or one for each matrix of the stack.

    References:
        Martens (2016), thesis, section 6.6.3.
    """
    side_a, side_g = sides or (Side(1, A.shape[0]), Side(1, G.shape[0]))
    mean_a, mean_g = mean_eigenvalue(A, side_a), mean_eigenvalue(G, side_g)
    ratio = ops.sqrt(ops.maximum(mean_a, TINY) / ops.maximum(mean_g, TINY))
    return ops.clip(ratio, *PI_RANGE)


def damped_inverses(factors: list, dampings: list, compiled: bool = False) -> list:
    """`(factor + damping I)^-1`, at a scale where float32 has digits to spare.

    A matrix is divided by its mean eigenvalue first. Damping below what rounding does
    to the largest eigenvalue would be lost, so it is raised to that.

    Args:
        factors: Symmetric positive semi-definite matrices, shape `(d, d)` each, or
            stacks of them, shape `(k, d, d)`, or a `Subspace` for a `LowRank` inverse.
        dampings: A positive scalar for each, or one for each of an equal share of
            the stack, shape `(k / m,)`.
        compiled: Whether the step runs inside XLA.

    Returns:
        The inverses; NaN throughout where a factorisation failed.
    """
    found = iter(low_ranks([f for f in factors if isinstance(f, Subspace)], compiled))
    factors = [next(found) if isinstance(f, Subspace) else f for f in factors]
    matrices = [f.within if isinstance(f, LowRank) else f for f in factors]
    systems = [
        (m, *_damping_and_scale(m, d)) for m, d in zip(matrices, dampings, strict=True)
    ]
    large = [system for system in systems if system[0].shape[-1] > 1]
    solved = iter(spd_inverses(*zip(*large, strict=True), compiled) if large else ())
    inverses = [
        next(solved) if m.shape[-1] > 1 else 1.0 / (m + damping[..., None, None])
        for m, damping, _ in systems
    ]
    return [
        LowRank.split(f.basis, inverse, 1.0 / (f.scale + damping))
        if isinstance(f, LowRank)
        else inverse
        for f, inverse, (_, damping, _) in zip(factors, inverses, systems, strict=True)
    ]


def _damping_and_scale(factor, damping) -> tuple:
    """Damping that rounding does not lose, and the mean eigenvalues with it."""
    d, trace = factor.shape[-1], traces(factor)
    if len(factor.shape) == 3 and len(damping.shape) == 1:
        damping = ops.repeat(damping, factor.shape[0] // damping.shape[0])
    damping = raised(damping, trace)
    return damping, trace / d + damping


def scaled_damped(factor, damping) -> tuple:
    """`((factor + damping I) / scale, scale)`, with a mean eigenvalue of 1."""
    damping, scale = _damping_and_scale(factor, damping)
    # No name for the identity: it would stay in memory until the end.
    identity = ops.eye(factor.shape[-1], dtype=factor.dtype)
    damped = factor + damping[..., None, None] * identity
    scale = scale[..., None, None]
    return damped / scale, scale


def raised(damping, trace):
    """Damping that rounding to the scale of the largest eigenvalue does not lose."""
    return ops.maximum(damping, FLOAT32_EPS * trace + TINY)


def inverse_of(side: Side, add_variable, name: str) -> list:
    """The optimizer's variables for an inverse: one, or those of a `LowRank` one."""
    if not side.rank:
        return [zeros_of(side, add_variable, name)]
    d, r = side.size, side.rank
    shapes = {"basis": (d, r), "core": (r, r), "scale": ()}
    return [
        add_variable(shape, "zeros", "float32", name=f"{name}_{part}")
        for part, shape in shapes.items()
    ]


def zeros_of(side: Side, add_variable, name: str):
    """A variable of the optimizer for a factor or its inverse."""
    return add_variable(side.shape, initializer="zeros", dtype="float32", name=name)
