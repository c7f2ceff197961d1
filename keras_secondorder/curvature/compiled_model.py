"""What a model must be for its curvature to be taken."""

import warnings

import keras
from keras import ops

from keras_secondorder import autodiff, vectors
from keras_secondorder.capture import check_layers


def build_loss(model, data) -> None:
    """Let Keras make what it makes at the first call of `compute_loss`."""
    before = model.metrics_variables
    values = [ops.copy(v) for v in vectors.values(before)]
    x, y, sample_weight = next(iter(data))
    with autodiff.no_grad():
        weights = vectors.copies(sample_weight)
        model.compute_loss(x, y, model(x, training=False), weights)
    if len(model.metrics_variables) == len(before):
        vectors.assign(before, values)
    else:
        model.reset_metrics()


def check_loss(model) -> None:
    """Refuse a model without a loss of outputs; warn of a `compute_loss` of its own."""
    if model.loss is None:
        raise ValueError(
            "The matrix is that of the losses of the model's outputs. Received a model "
            "compiled without one. Pass `loss=` to `compile`; of what `add_loss` adds, "
            "`hessian` has the curvature."
        )
    if has_own_loss(model):
        warnings.warn(
            f"{type(model).__name__} defines its own `compute_loss`. The matrix is "
            "that of the compiled loss; that of `compute_loss` is `hessian`.",
            stacklevel=4,
        )


def has_own_loss(model) -> bool:
    """Whether `compute_loss` may be something else than the compiled loss."""
    return type(model).compute_loss is not keras.Model.compute_loss


def check_model(model) -> None:
    """Refuse a model that is not compiled or has nothing to train."""
    if not model.compiled:
        raise ValueError(
            "The curvature is that of a compiled loss. Received a model that is not "
            "compiled. Call `model.compile(loss=...)` first."
        )
    if not model.built or not model.trainable_variables:
        raise ValueError(
            "The model has no trainable variables. Received one that is not built or "
            "is frozen. Call it on a batch, or unfreeze a layer, first."
        )
    check_layers(model)
