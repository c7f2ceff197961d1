"""The hook: what happens between `compile` and the first batch."""

import functools
import inspect
import types
import warnings

import keras

from keras_secondorder.arguments import check_kind, check_one_of, check_together
from keras_secondorder.capture import (
    Coverage,
    has_foreign_layers,
    is_built,
    plan_blocks,
)
from keras_secondorder.curvature import APPROXIMATIONS, TIKHONOV
from keras_secondorder.curvature.compiled_model import has_own_loss
from keras_secondorder.likelihoods import LOSS_WEIGHTS
from keras_secondorder.optimizers.base import SecondOrderOptimizer
from keras_secondorder.training.train_step import (
    inner_optimizer,
    second_order_step,
    stateless_train_step,
)


def attach(model) -> None:
    """Let a model be trained by its second-order optimizer.

    `compile` does this by itself once `keras_secondorder` is imported. The model's
    class is not touched: `train_step` is bound on the instance.

    Args:
        model: A Keras model, compiled with an optimizer of this package.

    Raises:
        ValueError: The optimizer is another one, the model's class has its own
            `train_step`, or TensorFlow distributes the model over several replicas.
    """
    optimizer = inner_optimizer(model) if model.compiled else None
    if not isinstance(optimizer, SecondOrderOptimizer):
        raise ValueError(
            "`attach` needs a model compiled with an optimizer of keras_secondorder. "
            f"Received a model whose optimizer is {type(optimizer).__name__}. "
            "Call `model.compile(optimizer=keras_secondorder.KFAC(), ...)` first."
        )
    reason = _reason_against(model, optimizer)
    if reason:
        raise ValueError(reason)
    if optimizer.needs_model and has_own_loss(model):
        warnings.warn(
            f"{type(model).__name__} defines its own `compute_loss`. It is what "
            f"{type(optimizer).__name__} minimises; the curvature is that of the "
            "losses given to `compile`. Write it as one of those, where it differs.",
            stacklevel=3,
        )
    optimizer.watch(model)
    step = second_order_step
    if keras.backend.backend() == "jax":
        step = stateless_train_step
    # Past the model's own attribute tracking, which would save the method with it.
    model.__dict__["train_step"] = types.MethodType(step, model)
    model.train_function = None  # one made before would go on with the other step
    if is_built(model) and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
        if model.optimizer is not optimizer:
            # `load_model` builds again what scales the loss: its scale would be there
            # twice, and the saved one lost.
            model.optimizer.__dict__["build"] = _is_built_already


def _is_built_already(variables):
    """In the place of `build`, where that may be called once only."""


def _reason_against(model, optimizer) -> str | None:
    """Why a model has to keep its own `train_step`, or None."""
    name = type(optimizer).__name__
    if type(model).train_step is not keras.Model.train_step:
        return (
            f"{type(model).__name__} defines its own `train_step`, which "
            f"{name} would have to replace. Received a custom "
            "training step. Move its computations to `call`, `compute_loss` and "
            "`add_loss`, which are used as they are, and remove `train_step`."
        )
    strategy = getattr(model, "distribute_strategy", None)
    if strategy is not None and strategy.num_replicas_in_sync > 1:
        return (
            f"{name} does not average its curvature over the "
            f"replicas of `tf.distribute`. Received {type(strategy).__name__} with "
            f"{strategy.num_replicas_in_sync} replicas. Train on one device, or on "
            "JAX with `keras.distribution.DataParallel`."
        )
    return None


def detach(model) -> None:
    """Give a model its own `train_step` back; does nothing where it has it.

    Args:
        model: A Keras model.
    """
    if model.__dict__.pop("train_step", None) is not None:
        model.train_function = None


def coverage(model, approximation: str | None = None) -> Coverage:
    """Print which curvature block each trainable variable gets, and why.

    Args:
        model: A built Keras model. Where it is compiled with `KFAC`, that optimizer's
            settings apply.
        approximation: As in `KFAC`; by default that of the optimizer.

    Returns:
        The blocks, a list of `capture.Block` that shows itself as the table.

    Raises:
        ValueError: It is no Keras model or not built, or there is no such
            approximation.

    Example:
        >>> import keras, keras_secondorder as kso
        >>> model = keras.Sequential(
        ...     [keras.Input((4,)), keras.layers.Dense(3, name="code")]
        ... )
        >>> blocks = kso.coverage(model)
        layer  variable  shape  block      factors         bytes  why
        code   kernel    4 x 3  kronecker  A 5 x 5, G 3 x 3  272
        code   bias      3      kronecker  as above
        curvature memory: 272 bytes, 544 more while it is renewed
    """
    check_kind("model", model, keras.Model, "a Keras model")
    optimizer = inner_optimizer(model) if model.compiled else None
    settings = {
        name: getattr(optimizer, name)
        for name in ("on_unsupported", "max_factor_size", "factor_memory")
        if hasattr(optimizer, name)
    }
    rank = getattr(optimizer, "rank", None)
    if not model.built or not (model.variables or is_built(model)):
        raise ValueError(
            f"The model '{model.name}' has no variables yet. Received a model that was "
            "never built. Call it on a batch, or `model.build(input_shape)`, first."
        )
    if approximation is None:
        approximation = getattr(optimizer, "approximation", "block_diagonal")
    check_one_of("approximation", approximation, APPROXIMATIONS)
    tikhonov = getattr(optimizer, "tikhonov", "factored")
    check_together("tikhonov", tikhonov, "approximation", approximation, TIKHONOV)
    form = TIKHONOV[tikhonov][approximation]
    blocks = Coverage(plan_blocks(model, **settings, **form.plan_options(rank)))
    print(blocks)
    return blocks


def install_hook() -> None:
    """Make `compile` of every Keras model call `attach` where it is needed.

    The one `compile` that all models inherit is wrapped in the class that defines it:
    Keras compares a model's `compile` with its base class's when it loads a model.
    """
    owner = next(c for c in keras.Model.__mro__ if "compile" in c.__dict__)
    original = owner.__dict__["compile"]
    signature = inspect.signature(original)
    if getattr(original, "is_keras_secondorder_hook", False):
        return

    @functools.wraps(original)
    def compile(self, *args, **kwargs):
        detach(self)
        result = original(self, *args, **kwargs)
        given = signature.bind(self, *args, **kwargs).arguments
        self.__dict__[LOSS_WEIGHTS] = given.get("loss_weights")
        optimizer = inner_optimizer(self)
        if isinstance(optimizer, SecondOrderOptimizer) and (
            optimizer.needs_model
            or not (_reason_against(self, optimizer) or has_foreign_layers(self))
        ):
            attach(self)
        return result

    compile.is_keras_secondorder_hook = True
    owner.compile = compile
