"""What every optimizer of this package promises, as a check of any of them."""

import json
import pathlib
import tempfile
from collections.abc import Callable

import keras
import numpy as np
from keras import ops

ROWS, FEATURES, STEPS = 48, 6, 7


def check_optimizer(
    make: Callable,
    quadratic_steps: int = 30,
    valley_steps: int = 30,
    decrease: float = 0.1,
) -> None:
    """Check that an optimizer minimises, is its config, and resumes where it was.

    ```
    quadratic   linear regression, inputs of scales 1 to 10:  loss falls to `decrease`
    valley      Rosenbrock's function as a Keras model:       the same, nothing skipped
    config      from_config(get_config()) and JSON give the same config
    resume      the quadratic's run, saved and loaded, goes on bit for bit
    ```

    Args:
        make: `() -> optimizer`, a new one at each call, always with the same arguments.
        quadratic_steps: Steps on the quadratic, each on all examples.
        valley_steps: Steps in the valley.
        decrease: Share of the first loss that the last one must be below.

    Raises:
        AssertionError: One of them fails; the message says which and how.

    Example:
        >>> import keras_secondorder as kso
        >>> from keras_secondorder.testing import check_optimizer
        >>> check_optimizer(kso.NaturalGradient)
    """
    check_config(make)
    model = check_minimises("quadratic", _regression, make, quadratic_steps, decrease)
    check_resume(make, model)
    check_minimises("valley", _valley, make, valley_steps, decrease)


def check_config(make: Callable) -> None:
    """Check that the config says everything, also as JSON.

    Args:
        make: `() -> optimizer`.

    Raises:
        AssertionError: The optimizer that is made from it is another one.
    """
    optimizer = make()
    config = optimizer.get_config()
    text = json.dumps(keras.saving.serialize_keras_object(optimizer))
    copies = {
        "from_config(get_config())": type(optimizer).from_config(config),
        "the JSON": keras.saving.deserialize_keras_object(json.loads(text)),
    }
    for how, again in copies.items():
        assert type(again) is type(optimizer), f"{how} gave a {type(again).__name__}."
        new = again.get_config()
        different = sorted(n for n in {**config, **new} if config.get(n) != new.get(n))
        assert not different, f"config: {how} changed {', '.join(different)}."


def check_minimises(
    name: str, problem: Callable, make: Callable, steps: int, decrease: float
) -> keras.Model:
    """Check that the loss on a whole data set falls, without a skipped step.

    Args:
        name: For the message.
        problem: `() -> (model, x, y)`, the model not yet compiled.
        make: `() -> optimizer`.
        steps: Number of steps.
        decrease: Share of the first loss that the last one must be below.

    Returns:
        The model after these steps.

    Raises:
        AssertionError: It does not, or a weight is not finite.
    """
    model, x, y = problem()
    model.compile(optimizer=make(), loss="mse")
    losses, skipped = [], 0
    for _ in range(steps):
        logs = model.train_on_batch(x, y, return_dict=True)
        model.reset_metrics()  # the loss of each batch, not the mean over all before
        losses.append(float(logs["loss"]))
        skipped = int(logs.get("skipped_steps", 0))
    assert np.isfinite(losses).all(), f"{name}: the loss became {losses}."
    assert skipped == 0, f"{name}: {skipped} of {steps} steps were skipped."
    assert losses[-1] < decrease * losses[0], (
        f"{name}: the loss went from {losses[0]:.3g} to {losses[-1]:.3g} in {steps} "
        f"steps, which is not below {decrease} of it."
    )
    for variable in model.weights:
        finite = np.isfinite(ops.convert_to_numpy(variable)).all()
        assert finite, f"{name}: {variable.path} is not finite."
    return model


def check_resume(make: Callable, model=None) -> None:
    """Check that a model that is saved and loaded goes on as if it had not been.

    Args:
        make: `() -> optimizer`.
        model: A regression that `make()` has trained on all rows at once, whose
            compiled step is used again. None for a new one.

    Raises:
        AssertionError: A weight or an optimizer variable is not bit-equal afterwards.
    """
    new, x, y = _regression()
    if model is None:
        model = new
        model.compile(optimizer=make(), loss="mse")
    # Drawn again each time: even in the minimum of all rows, each batch has a gradient.
    draws = np.random.default_rng(1).integers(ROWS, size=(STEPS, ROWS))

    def go_on(model):
        for rows in draws:
            model.train_on_batch(x[rows], y[rows])

    go_on(model)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "model.keras"
        model.save(path)
        loaded = keras.models.load_model(path)
    for when in ("loading", "going on"):
        ours, theirs = _state(model), _state(loaded)
        assert len(ours) == len(theirs), f"resume: {when} lost variables."
        # By number, as Keras restores them: names may say when a model was built.
        for (name, value), (_, other) in zip(ours, theirs, strict=True):
            same = np.array_equal(value, other, equal_nan=True)
            assert same, f"resume: after {when}, {name} is another."
        for each in (model, loaded):
            go_on(each)


def _state(model) -> list:
    """Names and copies of all weights and optimizer variables."""
    variables = [*model.weights, *model.optimizer.variables]
    return [
        (f"{i} {v.path.split('/')[-1]}", np.array(ops.convert_to_numpy(v)))
        for i, v in enumerate(variables)
    ]


def _regression() -> tuple:
    """Linear regression whose Hessian has the eigenvalues 1 to 100, nearly."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, FEATURES)) * np.geomspace(1.0, 10.0, FEATURES)
    y = x @ rng.normal(size=(FEATURES, 1)) + 0.1 * rng.normal(size=(ROWS, 1))
    model = keras.Sequential(
        [keras.Input((FEATURES,)), keras.layers.Dense(1, kernel_initializer="zeros")]
    )
    return model, x.astype("float32"), y.astype("float32")


@keras.saving.register_keras_serializable(package="keras_secondorder")
class _Valley(keras.layers.Layer):
    """`[10 (b - a^2), 1 - a]`, whose squares sum to Rosenbrock's function."""

    def build(self, shape):
        self.point = self.add_weight(shape=(2,), initializer="zeros", name="point")

    def call(self, x):
        a, b = self.point[0], self.point[1]
        return x * ops.stack([10.0 * (b - a * a), 1.0 - a])


def _valley() -> tuple:
    """The valley from the point (-1.2, 1); its floor is at a loss of about 2."""
    model = keras.Sequential([keras.Input((1,)), _Valley()])
    model.layers[0].point.assign(np.float32([-1.2, 1.0]))
    return model, np.ones((4, 1), "float32"), np.zeros((4, 2), "float32")
