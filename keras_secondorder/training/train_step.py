"""One batch, from `fit` to the weights: the train step of every backend."""

import warnings

import keras
from keras import ops

from keras_secondorder import autodiff, vectors
from keras_secondorder.objective import Objective
from keras_secondorder.optimizers.step_report import CAUSES, cause_of, entries_of


def second_order_step(model, data) -> dict:
    """Compute a step on one batch and commit it if it is finite.

    This is `train_step(data)` of the TensorFlow and PyTorch trainers.

    Args:
        model: A compiled Keras model with one of this package's optimizers.
        data: `(x, y, sample_weight)` as the trainer hands it over.

    Returns:
        The logs of the batch.
    """
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    outer = model.optimizer
    optimizer = inner_optimizer(model)
    _prepare(model, optimizer, x)
    with autodiff.no_grad():
        scale = outer.scale_loss(ops.ones(()))
        objective = Objective(
            model,
            x,
            y,
            sample_weight,
            optimizer.wrappers,
            optimizer.loss_weights,
            scale,
            precision=optimizer.precision,
        )
        empty, no_examples = CAUSES.index("empty_batch"), objective.examples == 0
        if no_examples is True:
            return {**_metrics(model), **_count_skipped(optimizer, empty)}
        if not objective.parameters:
            warnings.warn("The model has no trainable weights.", stacklevel=2)
            state = objective.linearize().aux.state
            vectors.assign(objective.state_variables, state)
            return _metrics(model)
        result = optimizer.step(objective)
        cause = _report(optimizer, result)
        if no_examples is not False:  # not known while the step is traced
            cause = ops.where(no_examples, empty, cause)
        skipped = _count_skipped(optimizer, cause)
        vectors.assign(objective.state_variables, result.state, where=result.finite)
        with optimizer.stepping():
            _apply(outer, optimizer, model, result)
    return {**_metrics(model), **result.logs, **skipped}


def _report(optimizer, result):
    """Keep what the step says of itself; the cause where it has to be skipped."""
    (before,) = vectors.values([optimizer.last_step])
    entries = entries_of(result, optimizer.learning_rate, before)
    vectors.assign([optimizer.last_step], [entries], where=result.finite)
    return cause_of(result, entries[0])


def _count_skipped(optimizer, cause) -> dict:
    """Add to the counts of skipped steps; the log of their sum."""
    one = ops.equal(ops.arange(len(CAUSES), dtype="int32"), ops.cast(cause, "int32"))
    # A new tensor: a variable cannot be among the outputs of a TensorFlow function.
    total = vectors.values([optimizer.skips])[0] + ops.cast(one, "int32")
    optimizer.skips.assign(total)
    return {"skipped_steps": ops.sum(total)}


def _prepare(model, optimizer, x) -> None:
    """Build what the TensorFlow trainer leaves to the first, traced, step."""
    if not optimizer.watches(model):  # another was compiled with it since
        optimizer.watch(model)
    if not model.optimizer.built:

        def build():
            spec = keras.tree.map_structure(
                lambda t: None if t is None else keras.KerasTensor(t.shape, t.dtype), x
            )
            model(spec)
            model.optimizer.build(model.trainable_variables)

        autodiff.eagerly(build)
    optimizer.check_variables(model.trainable_variables)
    optimizer.announce()


def _metrics(model) -> dict:
    """The metrics so far; the loss is NaN, not 0, while every batch was skipped."""
    logs = model.get_metrics_result()
    for metric in model.metrics:
        if metric.name == "loss" and "loss" in logs:
            seen = vectors.values([metric.count])[0] > 0
            logs["loss"] = ops.where(seen, logs["loss"], float("nan"))
    return logs


def inner_optimizer(model):
    """The model's optimizer, without the one that scales the loss around it."""
    return getattr(model.optimizer, "inner_optimizer", model.optimizer)


def _apply(outer, optimizer, model, result) -> None:
    """Hand the direction to Keras's own `apply`, or leave everything as it is."""
    variables = model.trainable_variables
    # A loss-scaling optimizer divides by its scale and watches for overflow itself.
    if outer is not optimizer:
        bad = ops.where(result.finite, 1.0, float("nan"))
        grads = [outer.scale_loss(d * bad) for d in result.direction]
        if keras.backend.backend() == "jax":
            state = outer.variables
            new = outer.stateless_apply(
                vectors.values(state), grads, vectors.values(variables)
            )
            vectors.assign([*variables, *state], [*new[0], *new[1]])
        else:
            outer.apply(grads, variables)
    elif keras.backend.backend() == "jax":
        # Inside JAX's stateless scope a condition cannot assign: compute, then choose.
        state = [*variables, *optimizer.variables]
        before = vectors.values(state)
        outer.apply([outer.scale_loss(d) for d in result.direction], variables)
        for v, old, new in zip(state, before, vectors.values(state), strict=True):
            if new is not old:
                v.assign(ops.where(result.finite, new, old))
    else:

        def apply():
            outer.apply([outer.scale_loss(d) for d in result.direction], variables)
            return ops.zeros(())

        ops.cond(result.finite, apply, lambda: ops.zeros(()))


def stateless_train_step(model, state, data):
    """`train_step(state, data)` of the JAX trainer: the same step inside a scope."""
    variables = (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )
    mapping = [
        pair
        for group, values in zip(variables, state, strict=True)
        for pair in zip(group, values, strict=True)
    ]
    with keras.StatelessScope(mapping) as scope:
        logs = second_order_step(model, data)
    new_state = tuple(
        [scope.get_current_value(v) for v in group] for group in variables
    )
    return logs, new_state
