"""What a convolution reads at each position of its output."""

import itertools

from keras import ops


def channels_last(tensor, data_format: str):
    """`(N, ..., C)`, whichever format the layer works in."""
    if data_format == "channels_last":
        return tensor
    axes = range(len(tensor.shape))
    return ops.transpose(tensor, (0, *axes[2:], 1))


def patches(inputs, kernel_size, strides, dilation, padding: str):
    """The inputs under the kernel at each position.

    Strided slices, one for each entry of the kernel: no arithmetic is done.

    Args:
        inputs: Shape `(N, *spatial, C)`.
        kernel_size: Entries of the kernel along each spatial axis.
        strides: Steps between positions.
        dilation: Steps between the entries of the kernel.
        padding: "valid", "same" or "causal", as in Keras.

    Returns:
        Shape `(N, T, K, C)`: T output positions and K kernel entries, both with the
        last spatial axis running fastest.
    """
    sizes, pads = [], [(0, 0)]
    for axis, (k, s, d) in enumerate(zip(kernel_size, strides, dilation, strict=True)):
        n, span = ops.shape(inputs)[1 + axis], (k - 1) * d + 1
        total = _padding(n, span, s, padding)
        before = total if padding == "causal" else total // 2
        sizes.append((n + total - span) // s + 1)
        pads.append((before, total - before))
    if padding != "valid":
        inputs = ops.pad(inputs, [*pads, (0, 0)])
    slices = []
    for offset in itertools.product(*(range(k) for k in kernel_size)):
        index = tuple(
            slice(o * d, o * d + (size - 1) * s + 1, s)
            for o, d, s, size in zip(offset, dilation, strides, sizes, strict=True)
        )
        slices.append(inputs[(slice(None), *index)])
    stacked = ops.stack(slices, axis=-2)  # (N, *out, K, C)
    positions = 1
    for size in sizes:
        positions = positions * size
    shape = (ops.shape(inputs)[0], positions, len(slices), inputs.shape[-1])
    return ops.reshape(stacked, shape)


def _padding(n, span: int, stride: int, padding: str):
    """Zeros on both sides of an axis of n entries."""
    if padding == "valid":
        return 0
    if padding == "causal" or stride == 1:
        return span - 1
    total = ((n + stride - 1) // stride - 1) * stride + span - n
    return max(total, 0) if isinstance(n, int) else ops.maximum(total, 0)
