"""What all optimizers of this package share: the model they see, and how they step."""

import contextlib
import inspect
import weakref
from typing import NamedTuple

import keras
from keras import ops

from keras_secondorder import vectors
from keras_secondorder.arguments import check_range
from keras_secondorder.capture import check_layers
from keras_secondorder.likelihoods import loss_weights_of
from keras_secondorder.optimizers.step_report import (
    CAUSES,
    ENTRIES,
    UNMEASURED,
    Measured,
)
from keras_secondorder.solvers.damping import AdaptiveDamping
from keras_secondorder.solvers.schedules import at_step, deserialize, serialize

FIRST_STEPS = 3  # statistics and inverses are fresh in each of these (thesis, 6.8)


def is_due(k, every: int):
    """Whether what is done every so many steps is done in step `k`.

    Args:
        k: Number of steps taken, an integer scalar.
        every: Steps between two times.

    Returns:
        A boolean scalar; true in each of the first steps, which say most.
    """
    return ops.logical_or(ops.equal(k % every, 0), k < FIRST_STEPS)


class StepResult(NamedTuple):
    """What one step hands back to the training loop.

    Attributes:
        direction: What Keras applies as the gradient, one tensor for each trainable
            variable.
        finite: Whether the step may be applied, a boolean scalar.
        state: New values of the model's and the metrics' state.
        logs: Scalars for `fit`'s logs.
        loss: The objective on the batch, where it is to be known to a monitor, as
            all that follows.
        gradient: Its gradient, a list like `direction`.
        successive: The cosine of this direction and the one before, a scalar.
        measured: How the quadratic model compares with the loss, where it was measured.
    """

    direction: list
    finite: object
    state: list
    logs: dict
    loss: object = 0.0
    gradient: list = ()
    successive: object = 0.0
    measured: Measured = UNMEASURED


class SecondOrderOptimizer(keras.optimizers.Optimizer):
    """Base class: an optimizer that looks at the model, not only at gradients.

    A subclass implements `step(objective)` and creates its variables in
    `build_state(model)`. All of them exist after `build`, so that Keras restores them.
    It keeps each argument of its constructor as an attribute of the same name.

    Args:
        learning_rate: A positive number, a schedule or a callable, as in Keras.
        **kwargs: Keras's shared optimizer arguments.
    """

    #: Arguments that are data, and so are not part of the config.
    not_saved: tuple = ()
    #: Dtype of the loss, the gradient and the curvature.
    precision = "float32"
    #: Whether it can step only in the training loop that `attach` binds.
    needs_model = True

    def __init__(self, learning_rate=1.0, **kwargs):
        if not callable(learning_rate):  # schedules are
            check_range("learning_rate", learning_rate, 0)
            learning_rate = float(learning_rate)
        super().__init__(learning_rate=learning_rate, **kwargs)
        self._model_reference = None
        self._stepping = False
        self.compiled_by_xla = False

    def watches(self, model) -> bool:
        """Whether `watch` was last called with this model."""
        return self._model_reference is not None and self._model_reference() is model

    def watch(self, model) -> None:
        """Remember the model, weakly, to lay out state for its layers in `build`."""
        self._model_reference = weakref.ref(model)
        self.compiled_by_xla = bool(model.jit_compile)
        self.loss_weights = loss_weights_of(model)

    def build(self, variables):
        """Create all variables, for the layers of the watched model."""
        if self.built:
            return
        model = self._model_reference() if self._model_reference else None
        if self.needs_model:
            if model is None:
                raise ValueError(_HOW_TO_USE.format(name=type(self).__name__))
            check_layers(model)
        super().build(variables)
        #: Skipped steps by cause, in the order of `step_report.CAUSES`.
        self.skips = self.add_variable((len(CAUSES),), "zeros", "int32", name="skips")
        #: What the last step said of itself, in the order of `step_report.ENTRIES`;
        #: 0 stands for what was not measured yet.
        self.last_step = self.add_variable(
            (len(ENTRIES),), "zeros", "float32", name="last_step"
        )
        self._laid_out = [id(v) for v in variables]
        self.build_state(model)

    def check_variables(self, variables) -> None:
        """Refuse variables other than those that the state was laid out for."""
        if [id(v) for v in variables] != self._laid_out:
            raise ValueError(
                f"{type(self).__name__} was built for other trainable variables than "
                "the model has now: a layer was frozen, unfrozen or added since, or it "
                "belongs to another model. "
                f"Compile the model again with a new `{type(self).__name__}()`."
            )

    @property
    def skipped_steps(self):
        """How many steps were skipped, a scalar."""
        return ops.sum(vectors.values([self.skips])[0])

    def announce(self) -> None:
        """Say once which variables fell back."""

    def build_state(self, model) -> None:
        """Create the optimizer's own variables."""
        raise NotImplementedError

    def step(self, objective) -> StepResult:
        """Compute one step on one batch; assign only the optimizer's own variables."""
        raise NotImplementedError

    def add_scalar(self, name: str, value: float):
        """Create a variable that holds one number."""
        initializer = keras.initializers.Constant(value)
        return self.add_variable((), initializer, self.precision, name=name)

    def get_config(self):
        """The constructor's arguments."""
        config = super().get_config()
        own = list(inspect.signature(type(self).__init__).parameters)[1:-1]
        for name in own:
            if name not in config:
                value = None if name in self.not_saved else getattr(self, name)
                config[name] = serialize(value)
        return config

    @classmethod
    def from_config(cls, config, custom_objects=None):
        """Rebuild the optimizer from its arguments."""
        return cls(**{name: deserialize(value) for name, value in config.items()})

    def build_damping(self, auto: AdaptiveDamping) -> None:
        """Create the variable that holds `lambda` where a rule adapts it.

        Args:
            auto: What `damping="auto"` stands for.
        """
        self._damping_rule = auto if self.damping == "auto" else self.damping
        self._adapted = isinstance(self._damping_rule, AdaptiveDamping)
        initial = self._damping_rule.initial if self._adapted else None
        self.damping_value = self.add_scalar("damping", float(initial or 0.0))
        self.damping_bounds = self.add_variable(
            (2,), "zeros", self.precision, name="damping_bounds"
        )

    @property
    def damping_rule(self):
        """What adapts `lambda`, or None where it is a number or a schedule."""
        return self._damping_rule if self._adapted else None

    def damping_at(self, k, loss, gradient, examples):
        """`lambda` of a step.

        Args:
            k: Number of steps taken.
            loss: The objective on the batch.
            gradient: Its gradient, a list of tensors.
            examples: Number of examples in the batch.
        """
        if not self._adapted:
            return ops.cast(at_step(self._damping_rule, k), self.precision)
        # A copy: PyTorch assigns in place, and this is read after the assignment.
        now = [v + 0.0 for v in vectors.values([self.damping_value])]
        now += vectors.values([self.damping_bounds])
        damping, bounds = self._damping_rule.start(*now, loss, gradient, examples)
        vectors.assign([self.damping_bounds], [bounds])
        return ops.cast(damping, self.precision)

    def next_damping(self, damping, rho):
        """`lambda` of the step after one.

        Args:
            damping: `lambda`.
            rho: The reduction ratio.
        """
        (bounds,) = vectors.values([self.damping_bounds])
        return self._damping_rule.update(damping, rho, bounds)

    @contextlib.contextmanager
    def stepping(self):
        """The context in which `apply` is allowed: the training loop's."""
        self._stepping = True
        try:
            yield
        finally:
            self._stepping = False

    def apply(self, grads, trainable_variables=None):
        """Refuse plain gradients; the training loop applies this optimizer's steps."""
        if not self._stepping:
            raise ValueError(_HOW_TO_USE.format(name=type(self).__name__))
        return super().apply(grads, trainable_variables)

    def update_step(self, gradient, variable, learning_rate):
        """`variable -= learning_rate * direction`."""
        dtype = vectors.precision_of([variable])
        step = ops.cast(learning_rate, dtype) * vectors.cast(gradient, dtype)
        self.assign_sub(variable, ops.cast(step, variable.dtype))


_HOW_TO_USE = (
    "{name} needs to see the layers of the model, not only gradients. It was used "
    "without `keras_secondorder.attach(model)`, through `apply_gradients` or another "
    "training loop. Import keras_secondorder before "
    "`model.compile(optimizer={name}())` and train with `fit` or `train_on_batch`."
)
