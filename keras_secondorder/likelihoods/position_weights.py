"""How much the loss at each position counts in the objective."""

import keras
from keras import ops

from keras_secondorder import autodiff
from keras_secondorder.likelihoods.heads import Head
from keras_secondorder.likelihoods.output_hessian import loss_values


class _Reduction(keras.losses.Loss):
    """Keras's own reduction, applied to values of ours instead of to a loss."""

    def __init__(self, values, loss):
        super().__init__("reduction", loss.reduction, loss.dtype)
        self._values = values

    def call(self, y_true, y_pred):
        return self._values


def position_weights(head: Head, z, y_pred):
    """The weight in the objective of the loss at every position.

    Keras's own reduction is linear in the values it reduces; its derivative says how
    much each of them counts, with sample weights, masks, the kind of mean and the
    replica count all in it.

    Args:
        head: The head.
        z: Its output as float32, shape `(positions..., D)`.
        y_pred: The same tensor as the model returned it, with its mask.

    Returns:
        Non-negative weights of shape `positions`.
    """
    values = ops.zeros_like(
        ops.stop_gradient(loss_values(head.loss, head.y, ops.stop_gradient(z)))
    )
    sample_weight = _without_ignored(head, values, y_pred)

    def reduced(primals, tap):
        total = ops.sum(
            _Reduction(primals[0], head.loss)(head.y, y_pred, sample_weight)
        )
        return [total if head.loss_weight is None else total * head.loss_weight], ()

    linear = autodiff.vjp(reduced, [values], taps=False)
    weights = linear.pullback([ops.ones_like(linear.outputs[0])])[0]
    weights = ops.cast(ops.stop_gradient(weights), z.dtype)
    mass = label_mass(head.loss, head.y) if head.labelled else None
    if mass is not None:
        weights = weights * ops.cast(mass, weights.dtype)
    weights = ops.where(weights < 0, ops.zeros_like(weights), weights)
    return _by_positions_of(z, weights, head.loss)


def label_mass(loss: keras.losses.Loss, y):
    """What the targets of a position sum to, where the loss is linear in them.

    Args:
        loss: A Keras loss.
        y: Targets.

    Returns:
        For a categorical cross-entropy, the sums of the labels over the classes: 1 for
        one-hot labels, 0 for a row of zeros, which has no loss. None for other losses,
        and on TensorFlow for logits: there the gradient is that of labels that sum to
        1, whatever they sum to.
    """
    if getattr(loss, "fn", None) is not keras.losses.categorical_crossentropy:
        return None
    if keras.backend.backend() == "tensorflow" and getattr(loss, "from_logits", False):
        return None
    smoothing = getattr(loss, "label_smoothing", 0.0)
    sums = ops.sum(ops.cast(y, "float32"), axis=getattr(loss, "axis", -1))
    return sums * (1.0 - smoothing) + smoothing


def _by_positions_of(z, weights, loss):
    """The weights without axes that Keras's losses would not have."""
    rank, examples = len(weights.shape), z.shape[0]
    if rank == len(z.shape) and weights.shape[-1] == 1:
        weights, rank = weights[..., 0], rank - 1
    if rank == 1 and weights.shape[0] == 1 != examples:
        return weights[0]
    known = zip(weights.shape, z.shape, strict=False)
    if any(None not in (a, b) and a != b for a, b in known):
        raise ValueError(
            f"The loss '{loss.name}' gives values of shape {tuple(weights.shape)} for "
            f"outputs of shape {tuple(z.shape)}. It must give one value an example or "
            "position, or one number; classes have to be the last axis of the outputs."
        )
    return weights


def _without_ignored(head: Head, values, y_pred):
    """The sample weights with the positions of `ignore_class` taken out.

    Keras passes that mask along with the loss values, which `_Reduction` replaces.
    """
    ignored = getattr(head.loss, "ignore_class", None)
    if ignored is None:
        return head.sample_weight
    y = ops.reshape(ops.convert_to_tensor(head.y), ops.shape(values))
    valid = ops.cast(ops.not_equal(y, ops.cast(ignored, y.dtype)), values.dtype)
    if head.loss.reduction in ("mean", "sum_over_batch_size"):
        mask = getattr(y_pred, "_keras_mask", None)
        seen = ops.ones_like(valid) if mask is None else ops.cast(mask, valid.dtype)
        valid = valid * ops.divide_no_nan(ops.sum(seen), ops.sum(seen * valid))
    if head.sample_weight is None:
        return valid
    weight = ops.cast(head.sample_weight, values.dtype)
    trailing = len(valid.shape) - len(weight.shape)
    if trailing < 0:
        weight = ops.squeeze(weight, axis=-1)
    return valid * ops.reshape(weight, (*ops.shape(weight), *([1] * max(trailing, 0))))


def by_position(z, weights):
    """`z` with one leading axis for each axis of `weights`, the rest flattened.

    Keras losses may average over more than the last axis, e.g. for outputs `(N, T, 1)`
    against targets `(N, T)`; what they average over is one position.
    """
    width = 1
    for side in z.shape[len(weights.shape) :]:
        width *= side
    return ops.reshape(z, (*ops.shape(weights), width))


def with_shares(losses, sample_weight, share, count):
    """Sample weights with which sums over some examples stand for those of all.

    Args:
        losses: What `compile` was given as `loss`.
        sample_weight: Weights of the examples, in the structure given to `fit`, or
            None.
        share: How many examples of the batch each stands for, a scalar.
        count: Number of the examples.

    Returns:
        The weights as they were where every loss is a mean.
    """
    if isinstance(losses, dict):  # a wrapper of one, where TensorFlow is imported
        losses = dict(losses)
    sums = keras.tree.map_structure(_is_sum, losses)
    known = {s for s in keras.tree.flatten(sums) if s is not None}
    if True not in known:
        return sample_weight

    def scaled(w, is_sum):
        w = ops.ones((count,)) if w is None else w
        return w * share if is_sum else w

    if len(known) == 1:
        return keras.tree.map_structure(lambda w: scaled(w, True), sample_weight)
    if not keras.tree.is_nested(sample_weight):  # the same for every loss
        return keras.tree.map_structure(lambda s: scaled(sample_weight, s), sums)
    return keras.tree.map_structure(scaled, sample_weight, sums)


def _is_sum(identifier):
    """Whether a loss adds up its values over the batch; None where there is none."""
    if identifier is None:
        return None
    # A plain function has no reduction of its own: Keras takes the mean.
    reduction = getattr(keras.losses.get(identifier), "reduction", "mean")
    return reduction in ("sum", "none", None)
