"""A batch taken chunk by chunk, so that one chunk at a time is in memory."""

import keras
from keras import ops

from keras_secondorder import vectors
from keras_secondorder.capture import all_layers
from keras_secondorder.layers import MeanOnlyBatchNormalization
from keras_secondorder.likelihoods import couples

ADDITIVE = ("sum", "mean", "sum_over_batch_size")
_COUPLING = (keras.layers.BatchNormalization, MeanOnlyBatchNormalization)


def fold(objective, size: int, f, initial):
    """`carry = f(carry, chunk, share)` for all chunks of a batch, in a compiled loop.

    The sizes of the chunks differ by one example at most. Each is an objective that
    estimates that of the batch: with its share `n / N` of the examples for weight, the
    values, gradients and curvature of the chunks sum to those of the batch.

    Args:
        objective: The batch.
        size: Most examples in a chunk.
        f: A function of a nest of tensors, an `Objective` and a scalar to a nest of the
            same structure, shapes and dtypes.
        initial: The first `carry`.

    Returns:
        The last `carry`.
    """
    total = objective.examples
    count = (total + size - 1) // size
    small = total // count
    larger = total - small * count
    carry = initial
    for number, rows, first in (
        (larger, small + 1, 0),
        (count - larger, small, larger * (small + 1)),
    ):
        if isinstance(number, int) and number == 0:
            continue
        share = ops.cast(rows, objective.precision) / ops.cast(
            total, objective.precision
        )

        def body(i, carry, rows=rows, first=first, share=share):
            start = first + ops.cast(i, "int32") * rows
            chunk = objective.at(start + ops.arange(rows, dtype="int32"))
            return f(carry, chunk, share)

        carry = ops.fori_loop(0, number, body, carry)
    return carry


def mean(objective, size: int, f, zeros: list) -> list:
    """The mean of a list of tensors over the chunks, weighted by their shares.

    Args:
        objective: The batch.
        size: Most examples in a chunk.
        f: A function of an `Objective` to a list of tensors.
        zeros: Zeros of their shapes, in the dtype to add in.
    """

    def add(carry, chunk, share):
        return [
            c + ops.cast(share, c.dtype) * ops.cast(t, c.dtype)
            for c, t in zip(carry, f(chunk), strict=True)
        ]

    return fold(objective, size, add, zeros)


def value(objective, size: int, parameters: list):
    """`objective.value(parameters)`, chunk by chunk."""
    zeros = [ops.zeros((), objective.precision)]
    return mean(objective, size, lambda chunk: [chunk.value(parameters)], zeros)[0]


def loss_and_gradient(objective, size: int) -> tuple:
    """The loss, its gradient and the new state of the model, chunk by chunk.

    Every chunk starts from the state of the model at the start of the step, and from
    the metrics as the chunk before left them.

    Args:
        objective: The batch.
        size: Most examples in a chunk.

    Returns:
        `(loss, gradient, state)`, as `Objective.linearize` and `gradient` have them.
    """
    own = len(objective.model.non_trainable_variables)

    def add(carry, chunk, share):
        loss, gradient, state = carry
        chunk.state = [*objective.state[:own], *state[own:]]
        linear = chunk.linearize()
        check_losses(chunk, linear.outputs[1:])
        new, _ = chunk.gradient(linear)
        gradient = vectors.axpy(share, new, gradient)
        return loss + share * linear.outputs[0], gradient, linear.aux.state

    zeros = [ops.zeros(p.shape, objective.precision) for p in objective.parameters]
    initial = ops.zeros((), objective.precision), zeros, objective.state
    return fold(objective, size, add, initial)


def check_chunks(layer) -> None:
    """Refuse layers whose outputs depend on the whole batch.

    Args:
        layer: A layer or model.

    Raises:
        ValueError: There is one, in training mode.
    """
    for found in all_layers(layer):
        if isinstance(found, _COUPLING) and found.trainable:
            raise ValueError(
                f"The examples of a batch meet in '{found.name}', so that the batch is "
                f"not the sum of its chunks. Received a {type(found).__name__} and a "
                "`chunk_size`. Set its `trainable = False`, or leave `chunk_size` out."
            )


def check_losses(chunk, outputs: list) -> None:
    """Refuse losses that those of the chunks do not add up to.

    Args:
        chunk: An objective, after its forward pass.
        outputs: The outputs of its model, flattened.

    Raises:
        ValueError: A loss compares examples with one another, or divides by something
            that only the whole batch knows: its weights, or its positions that are not
            masked or ignored.
    """
    for head in chunk.heads:
        if couples(head.loss, head.y, outputs[head.output]):
            raise ValueError(
                "In chunks, a loss has to be a sum over the examples or their mean. "
                f"Received {head.loss}, which compares them with one another. Leave "
                "`chunk_size` out."
            )
    model = chunk.model
    positions = any(len(z.shape) > 2 for z in outputs)
    masked = positions and any(map(_makes_masks, all_layers(model)))
    for given in keras.tree.flatten(model.loss):
        loss = keras.losses.get(given)
        # A plain function has no reduction of its own: Keras takes the mean.
        reduction = getattr(loss, "reduction", "mean")
        ignoring = masked or getattr(loss, "ignore_class", None) is not None
        if ignoring or reduction not in ADDITIVE:
            what = "masked or ignored positions" if ignoring else "weights"
            raise ValueError(
                "In chunks, a loss has to be a sum over the examples or their mean, "
                f"and not to depend on the {what} of the whole batch. Received "
                f"{loss} with reduction={reduction!r}. Use sample weights and another "
                "reduction, or leave `chunk_size` out."
            )


def _makes_masks(layer) -> bool:
    return isinstance(layer, keras.layers.Masking) or getattr(layer, "mask_zero", False)
