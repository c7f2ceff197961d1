"""The compiled loss of a model, taken apart: one head for each output with a loss."""

import functools
import warnings
from typing import Any, NamedTuple

import keras
from keras import ops

from keras_secondorder.likelihoods.base import Likelihood
from keras_secondorder.likelihoods.bernoulli import Bernoulli
from keras_secondorder.likelihoods.categorical import Categorical
from keras_secondorder.likelihoods.examination import is_coupled
from keras_secondorder.likelihoods.gaussian import Gaussian
from keras_secondorder.likelihoods.outer_product import OuterProduct
from keras_secondorder.likelihoods.output_hessian import OutputHessian
from keras_secondorder.likelihoods.poisson import Poisson


class Head(NamedTuple):
    """One output with a loss.

    Attributes:
        output: Index of the output among the flattened outputs of the model.
        loss: A `keras.losses.Loss`.
        loss_weight: Its weight in the objective, or None.
        target: Index of its target among the flattened targets.
        sample_weight: The sample weights that apply to it, or None.
        y: Its targets.
        labelled: Whether these are targets, and not zeros in their place.
    """

    output: int
    loss: keras.losses.Loss
    loss_weight: Any
    target: int
    sample_weight: Any
    y: Any
    labelled: bool = True


# Where the hook on `compile` keeps that argument on the model.
LOSS_WEIGHTS = "keras_secondorder_loss_weights"

# What `compile` wraps a plain function in; it has no public name.
_FunctionLoss = keras.losses.MeanSquaredError.__base__


_BY_FUNCTION = {
    keras.losses.mean_squared_error: lambda loss: Gaussian(),
    keras.losses.binary_crossentropy: lambda loss: Bernoulli(loss.from_logits),
    keras.losses.categorical_crossentropy: lambda loss: Categorical(loss.from_logits),
    keras.losses.sparse_categorical_crossentropy: (
        lambda loss: Categorical(loss.from_logits)
    ),
    keras.losses.poisson: lambda loss: Poisson(),
}
_LOSS_OF_FUNCTION = {
    keras.losses.mean_squared_error: keras.losses.MeanSquaredError,
    keras.losses.binary_crossentropy: keras.losses.BinaryCrossentropy,
    keras.losses.categorical_crossentropy: keras.losses.CategoricalCrossentropy,
    keras.losses.sparse_categorical_crossentropy: (
        keras.losses.SparseCategoricalCrossentropy
    ),
    keras.losses.poisson: keras.losses.Poisson,
}


def as_loss(identifier, y, y_pred) -> keras.losses.Loss:
    """What `compile(loss=...)` was given, as a `keras.losses.Loss` object.

    Args:
        identifier: String, function or loss object.
        y: The targets, from whose shape "crossentropy" is resolved as Keras does.
        y_pred: The output.

    Returns:
        A loss object with the reduction that Keras will use.

    Raises:
        ValueError: The loss reduces by itself, in `__call__`.
    """
    if isinstance(identifier, str) and identifier in ("crossentropy", "ce"):
        if y_pred.shape[-1] == 1:
            identifier = "binary_crossentropy"
        elif len(y.shape) < len(y_pred.shape) or y.shape[-1] == 1:
            identifier = "sparse_categorical_crossentropy"
        else:
            identifier = "categorical_crossentropy"
    loss = _loss_object(identifier)
    if type(loss).__call__ is not keras.losses.Loss.__call__:
        raise ValueError(
            f"{type(loss).__name__} defines `__call__`, so its values at single "
            "positions cannot be seen. Received a loss that reduces by itself. "
            "Override `call(y_true, y_pred)` instead, as Keras's losses do."
        )
    return loss


@functools.lru_cache(maxsize=64)
def _loss_object(identifier) -> keras.losses.Loss:
    # Remembered so that a loss given by name is one object, and is checked once.
    loss = keras.losses.get(identifier)
    if isinstance(loss, keras.losses.Loss):
        return loss
    return _LOSS_OF_FUNCTION.get(loss, lambda: _FunctionLoss(loss))()


_is_coupled = functools.lru_cache(maxsize=64)(is_coupled)


def likelihood_of(
    loss: keras.losses.Loss, y, z, gradient_only: bool = False
) -> Likelihood:
    """The output distribution that a loss stands for.

    Args:
        loss: A Keras loss.
        y: The targets of the batch.
        z: The output of the network, shape `(..., D)`.
        gradient_only: Whether no Hessian is asked of it, so that there is nothing to
            warn of.

    Returns:
        A `Likelihood`. A loss without a distribution is looked at once, with warnings.
    """
    known = _distribution_of(loss)
    if known is not None and getattr(loss, "axis", -1) in (-1, len(z.shape) - 1):
        return known(loss)
    if gradient_only:
        return OutputHessian(loss, y, ops.shape(z))
    made = OuterProduct if couples(loss, y, z) else OutputHessian
    return made(loss, y, ops.shape(z))


def couples(loss: keras.losses.Loss, y, z) -> bool:
    """Whether a loss couples examples, positions or many outputs of one.

    Args:
        loss: A Keras loss.
        y: The targets of the batch.
        z: The output of the network, shape `(..., D)`.
    """
    if _distribution_of(loss) is not None:
        return False
    classes = "int" in keras.backend.standardize_dtype(y.dtype)
    return _is_coupled(loss, _sides(y.shape), _sides(z.shape), classes)


def _sides(shape) -> tuple:
    """A shape without the examples; of inner axes, two steps show enough."""
    return (*[min(side or 2, 2) for side in shape[1:-1]], *shape[1:][-1:])


def _distribution_of(loss):
    # A subclass that overrides `call` is another loss, whatever it inherits from.
    inherited = type(loss).call is keras.losses.MeanSquaredError.call
    return _BY_FUNCTION.get(getattr(loss, "fn", None)) if inherited else None


def check_likelihood(loss: keras.losses.Loss) -> None:
    """Refuse a loss whose curvature cannot be had without targets.

    Args:
        loss: A Keras loss.

    Raises:
        ValueError: It is not known as the negative logarithm of a distribution.
    """
    if _distribution_of(loss) is None:
        name = getattr(getattr(loss, "fn", None), "__name__", loss.name)
        raise ValueError(
            "Without targets there is a Fisher matrix of squared errors, binary and "
            f"categorical cross-entropies and the Poisson loss. Received '{name}', "
            "which is not known as a negative log-likelihood. Use "
            "`curvature.gauss_newton(model, x, y)`, or give NaturalGradient labelled "
            "`metric_data`."
        )


def read_heads(model, y, y_pred, sample_weight, loss_weights=None) -> list[Head]:
    """Pair the outputs of a compiled model with their losses, as Keras does.

    Args:
        model: A compiled Keras model.
        y: Targets, in the structure given to `fit`, or None where they don't matter.
        y_pred: Outputs, in the structure that the model returns.
        sample_weight: Weights in either structure, or None.
        loss_weights: The weights of the losses; see `loss_weights_of`.

    Returns:
        One `Head` for each output that has a loss. Empty where the model has no loss
        of its own (`add_loss` only).

    Raises:
        ValueError: The structures cannot be matched.
    """
    if model.loss is None:
        return []
    names = list(getattr(model, "output_names", None) or [])
    outputs = keras.tree.flatten(y_pred)
    keys = list(y_pred) if isinstance(y_pred, dict) else None
    order = sorted(keys) if keys is not None else names

    def per_output(given, what):
        """One entry for each output, None where there is none."""
        if given is None or not keras.tree.is_nested(given):
            return [given] * len(outputs)
        if isinstance(given, dict):
            unknown = set(given) - set(order)
            if unknown:
                raise ValueError(
                    f"`{what}` names outputs that the model does not have: "
                    f"{sorted(unknown)}. The model's outputs are {order}."
                )
            return [given.get(name) for name in order]
        flat = list(given)
        if len(flat) == 1 and len(outputs) == 1:
            return flat
        if len(flat) == len(outputs):
            return flat
        with_loss = [i for i, loss in enumerate(losses) if loss is not None]
        if len(flat) != len(with_loss):
            raise ValueError(
                f"`{what}` has {len(flat)} entries, and the model has {len(outputs)} "
                f"outputs, {len(with_loss)} of them with a loss. Give one for each."
            )
        filled = [None] * len(outputs)
        for i, entry in zip(with_loss, flat, strict=True):
            filled[i] = entry
        return filled

    losses = outputs  # until they are known, every output may have one
    losses = per_output(model.loss, "loss")
    loss_weights = per_output(loss_weights, "loss_weights")
    if y is not None and not keras.tree.is_nested(y):
        with_loss = sum(loss is not None for loss in losses)
        if with_loss > 1:
            raise ValueError(
                f"The model has {with_loss} outputs with a loss, and `y` is one array. "
                "Give one for each of them, as a list or a dict."
            )
    targets = per_output(y, "y")
    if y is None:
        pairs = zip(losses, outputs, strict=True)
        targets = [None if loss is None else _no_targets(loss, z) for loss, z in pairs]
    weights = per_output(sample_weight, "sample_weight")
    return [
        Head(
            i,
            as_loss(loss, targets[i], outputs[i]),
            loss_weights[i],
            i,
            weights[i],
            targets[i],
            y is not None,
        )
        for i, loss in enumerate(losses)
        if loss is not None
    ]


def _no_targets(loss, z):
    """Zeros shaped like the targets of a loss, where there are only inputs."""
    loss = keras.losses.get(loss)
    sparse = keras.losses.sparse_categorical_crossentropy
    classes = getattr(loss, "fn", loss) is sparse
    return ops.zeros_like(z[..., 0] if classes else z)


def loss_weights_of(model):
    """The `loss_weights` that the model was compiled with; not while tracing.

    Keras's own record has them too, but to read it imports TensorFlow on all backends.
    """
    if LOSS_WEIGHTS in vars(model):
        return vars(model)[LOSS_WEIGHTS]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about lambdas that could not be saved
        config = model.get_compile_config() or {}
    return config.get("loss_weights")
