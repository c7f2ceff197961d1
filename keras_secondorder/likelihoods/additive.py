"""Whether a loss of a batch is the sum, or the mean, of those of its examples."""

import keras

ADDITIVE = ("sum", "mean", "sum_over_batch_size")


def check_additive(losses, y_pred) -> None:
    """Refuse a loss that the parts of a batch do not add up to.

    Args:
        losses: What `compile` was given.
        y_pred: The outputs, with their masks.

    Raises:
        ValueError: A loss divides by something that only the whole batch knows: its
            weights, or its positions that are not masked or ignored.
    """
    masked = any(
        getattr(z, "_keras_mask", None) is not None for z in keras.tree.flatten(y_pred)
    )
    for given in keras.tree.flatten(losses):
        loss = keras.losses.get(given)
        # A plain function has no reduction of its own: Keras takes the mean.
        reduction = getattr(loss, "reduction", "mean")
        ignoring = masked or getattr(loss, "ignore_class", None) is not None
        if ignoring or reduction not in ADDITIVE:
            what = "masked or ignored positions" if ignoring else "weights"
            raise ValueError(
                f"In chunks, a loss has to be a sum over the examples or their mean, "
                f"and not to depend on the {what} of the whole batch. Received "
                f"{loss} with reduction={reduction!r}. Use sample weights and another "
                "reduction, or leave `chunk_size` out."
            )
