"""What a step says of itself, for those who watch it."""

from typing import NamedTuple

from keras import ops

from keras_secondorder import vectors

#: What the variable `last_step` of an optimizer holds, in order. The cosines are those
#: of the update `-learning_rate d`; before clipping and weight decay.
ENTRIES = (
    "gradient_norm",
    "update_norm",
    "update_gradient_cosine",
    "successive_cosine",
    "predicted_change",
    "actual_change",
    "quadratic_form",
)
#: Why a step was skipped, in the order of the variable `skips`.
CAUSES = ("loss", "gradient", "step", "empty_batch")


class Measured(NamedTuple):
    """How the quadratic model of a step compares with the loss; NaN where unknown.

    Attributes:
        predicted: The change of the objective by the damped quadratic model.
        actual: The change of the objective.
        quadratic: `delta^T C delta` with the curvature matrix, without the damping.
    """

    predicted: object
    actual: object
    quadratic: object


def compare(predicted, actual, gradient, update, dampings) -> Measured:
    """What was measured of a step whose model is damped.

    Args:
        predicted: `1/2 delta^T (C + lambda) delta + gradient . delta`.
        actual: The change of the objective.
        gradient: The gradient, a list of tensors.
        update: `delta`, a list like it.
        dampings: `lambda` of each, a list.

    Returns:
        A `Measured`.
    """
    damped = 2.0 * (predicted - vectors.dot(gradient, update))
    added = [d * vectors.dot([u], [u]) for d, u in zip(dampings, update, strict=True)]
    return Measured(predicted, actual, damped - sum(added))


UNMEASURED = Measured(float("nan"), float("nan"), float("nan"))


def entries_of(result, learning_rate, before):
    """The entries of a step.

    Args:
        result: A `StepResult`.
        learning_rate: What the direction is multiplied by, a scalar.
        before: The entries of the step before; what was not measured stays.

    Returns:
        Tensor of shape `(len(ENTRIES),)`, float32.
    """
    # In float32: a model in float64 has steps in float64.
    gradient = [vectors.cast(t, "float32") for t in result.gradient]
    direction = [vectors.cast(t, "float32") for t in result.direction]
    g, d = vectors.norm(gradient), vectors.norm(direction)
    downhill = vectors.dot(gradient, direction) if gradient else 0.0
    measured = ops.stack([vectors.cast(m, "float32") for m in result.measured])
    kept = before[-len(result.measured) :]
    lr = ops.cast(learning_rate, "float32")
    entries = [
        g,
        lr * d,
        -ops.divide_no_nan(downhill, g * d),
        result.successive,
    ]
    return ops.concatenate(
        [
            ops.stack([vectors.cast(e, "float32") for e in entries]),
            ops.where(ops.isfinite(measured), measured, kept),
        ]
    )


def cause_of(result, gradient_norm):
    """Why a step may not be applied: an index into `CAUSES`, or -1 where it may.

    Args:
        result: A `StepResult`.
        gradient_norm: The norm of its gradient.
    """
    unusable = ops.where(ops.isfinite(gradient_norm), 2, 1)
    cause = ops.where(ops.isfinite(result.loss), unusable, 0)
    return ops.where(result.finite, -1, cause)


def read(optimizer) -> dict:
    """The report of the last step that was applied.

    Args:
        optimizer: A built optimizer of this package, with its variables in sync.

    Returns:
        Floats by the names of `ENTRIES`; those that are not known yet are left out.
    """
    values = ops.convert_to_numpy(optimizer.last_step)
    report = dict(zip(ENTRIES, map(float, values), strict=True))
    return {name: value for name, value in report.items() if value != 0}
