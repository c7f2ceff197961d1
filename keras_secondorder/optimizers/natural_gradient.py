"""Natural gradient descent by a truncated solve, with the metric on data of choice."""

import warnings

import keras
import numpy as np
from keras import ops

from keras_secondorder import vectors
from keras_secondorder.arguments import (
    check_count,
    check_one_of,
    check_range,
)
from keras_secondorder.curvature.batches import items_of
from keras_secondorder.curvature.products import (
    empirical_fisher_products,
    fisher_products,
)
from keras_secondorder.likelihoods import CounterSeed
from keras_secondorder.optimizers.truncated_newton import Trial, TruncatedNewton
from keras_secondorder.solvers import conjugate_gradient, minres_qlp

METRICS = ("fisher", "covariance")
SOLVERS = ("minres_qlp", "cg")


@keras.saving.register_keras_serializable(package="keras_secondorder")
class NaturalGradient(TruncatedNewton):
    """Natural gradient descent with the metric of the model's own distribution.

    ```
    G     = J^T F_z J                             # on metric_data, no labels needed
    delta = solve (G + lambda I) delta = -g       # a few iterations
    t     = backtracking line search along delta
    theta += learning_rate * t * delta
    lambda  follows  rho = (h(theta + t delta) - h(theta)) / M(t delta)
    ```

    With linear, sigmoid and softmax outputs `F_z` is that of a Gaussian, of Bernoulli
    variables and of a categorical one, as the compiled loss says.

    Args:
        learning_rate: A number or a Keras schedule; 1 takes the step as found.
        damping: `lambda`: an `AdaptiveDamping` object, a number or a schedule.
            "auto" is `AdaptiveDamping(None, every=1, decay=2/3, minimum=1e-6)`.
        metric: "fisher", or "covariance" for the centred covariance of the gradients
            of single examples, which needs labels.
        metric_data: What `G` is measured on: None for the batch itself; an array of
            inputs, labelled or not; `(x, y)`; or a data set or a list of such tuples,
            which is read once. It is not saved with the model.
        metric_rows: Examples drawn from `metric_data` for each step, with replacement;
            all of them where there are no more.
        solver: "minres_qlp" or "cg".
        solver_iterations: Most iterations of the solver for a step.
        rtol: Residual at which it stops, relative to the gradient.
        selection_fraction: Share of the batch for line search and reduction ratio.
        seed: Seed of the draws from `metric_data`.
        **kwargs: Keras's shared arguments.

    Raises:
        ValueError: Arguments that do not go together.

    Example:
        >>> import keras, keras_secondorder as kso
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> x = keras.random.normal((256, 4), seed=0)
        >>> optimizer = kso.NaturalGradient(metric_data=x[64:])
        >>> model.compile(optimizer=optimizer, loss="mse")
        >>> history = model.fit(x[:64], x[:64, :1], batch_size=64, epochs=12, verbose=0)
        >>> history.history["loss"][-1] < 1e-3
        True

    References:
        Pascanu & Bengio (2014), sections 2 to 5 and 7; eq. 30 for the damping. For
        "covariance": Le Roux, Manzagol & Bengio (2008).
    """

    not_saved = ("metric_data",)

    def __init__(
        self,
        learning_rate=1.0,
        damping="auto",
        metric: str = "fisher",
        metric_data=None,
        metric_rows: int = 500,
        solver: str = "minres_qlp",
        solver_iterations: int = 20,
        rtol: float = 1e-4,
        selection_fraction: float = 1.0,
        seed: int = 0,
        **kwargs,
    ):
        check_one_of("metric", metric, METRICS)
        check_one_of("solver", solver, SOLVERS)
        check_count("metric_rows", metric_rows)
        check_count("solver_iterations", solver_iterations)
        check_range("rtol", rtol, 0)
        super().__init__(learning_rate, damping, selection_fraction, **kwargs)
        self.metric = metric
        self.metric_data = metric_data
        self.metric_rows = metric_rows
        self.solver = solver
        self.solver_iterations = solver_iterations
        self.rtol = rtol
        self.seed = seed
        if metric == "covariance" and self.metric_data and self.metric_data[1] is None:
            raise ValueError(
                "The covariance of the gradients needs labels. Received "
                "metric='covariance' with inputs only. Pass metric_data=(x, y), or use "
                "metric='fisher'."
            )

    @property
    def metric_data(self):
        """What the metric is measured on, `(x, y)` as arrays, or None.

        It may be set before training begins or goes on, as after `load_model`, which
        comes without it.

        Raises:
            ValueError: When set: the step is compiled already, with the data it had.
        """
        return self._metric_data

    @metric_data.setter
    def metric_data(self, data):
        model = self._model_reference and self._model_reference()
        if model is not None and model.train_function is not None:
            raise ValueError(
                "The step is compiled with the metric's data in it. Received other "
                "data after a first step. Set `metric_data` right after `load_model`, "
                "or compile the model with a new optimizer."
            )
        arrays = None if data is None else _arrays(data)
        _check_arrays(arrays)
        self._metric_data = arrays
        self._metric_tensors = keras.tree.map_structure(
            lambda a: None if a is None else ops.convert_to_tensor(a), arrays
        )

    def propose(self, objective, linear, gradient, damping, k) -> Trial:
        """A truncated solve with the damped metric."""
        metric = self._metric_objective(objective, k)
        if self.metric == "covariance":
            G = empirical_fisher_products(metric, centered=True)
        else:
            G = fisher_products(metric)

        def product(x):
            return self.flatten(G.product(self.unflatten(x))) + damping * x

        if self.solver == "cg":
            solution = conjugate_gradient(
                product,
                -gradient,
                max_iterations=self.solver_iterations,
                epsilon=None,
                rtol=self.rtol,
            )
        else:
            solution = minres_qlp(
                product,
                -gradient,
                max_iterations=self.solver_iterations,
                rtol=self.rtol,
            )
        step = solution.x
        logs = {
            "solver_iterations": solution.iterations,
            "solver_residual": ops.divide_no_nan(
                solution.residual_norm, ops.sqrt(ops.sum(gradient * gradient))
            ),
            "solver_status": solution.status,
        }
        slope, curvature = ops.sum(gradient * step), ops.sum(step * product(step))
        damped = damping * ops.sum(step * step)
        return Trial(step, slope, curvature, damped, self.change_of(objective), logs)

    def _metric_objective(self, objective, k):
        """The examples that the metric is measured on in this step."""
        if self._metric_tensors is None:
            return objective
        x, y = self._metric_tensors
        total, count = keras.tree.flatten(x)[0].shape[0], self.metric_rows
        if total <= count:
            return objective.on(x, y, None)
        draw = keras.random.uniform((count,), seed=CounterSeed(self.seed, k, stream=2))
        rows = ops.minimum(ops.cast(draw * total, "int32"), total - 1)
        return objective.on(*vectors.take_rows((x, y), rows), None)

    def get_config(self):
        """The constructor's arguments, without the metric's data."""
        if self.metric_data is not None:
            warnings.warn(
                "The data of NaturalGradient(metric_data=...) are not saved. A model "
                "that is loaded measures its metric on the batch until "
                "`model.optimizer.metric_data = ...` is set.",
                stacklevel=2,
            )
        return super().get_config()


def _check_arrays(data) -> None:
    arrays = [a for a in keras.tree.flatten(data) if a is not None]
    shapes = [a.shape for a in arrays]
    if any(0 in shape for shape in shapes):
        raise ValueError(
            "`metric_data` has no examples. Received arrays of the shapes "
            f"{shapes}. Pass at least one, or None for the batch itself."
        )
    if len({shape[:1] for shape in shapes}) > 1:
        raise ValueError(
            "`metric_data` must have as many rows in each array. Received the "
            f"shapes {shapes}. Pass the same examples."
        )
    numbers = [a for a in arrays if a.dtype.kind in "fiu"]
    if not all(np.isfinite(a).all() for a in numbers):
        raise ValueError(
            "`metric_data` must be finite: a metric with a NaN would have every "
            "step skipped. Received arrays with NaN or Inf. Leave these rows out."
        )


def _arrays(data) -> tuple:
    """`(x, y)` as NumPy arrays in Keras's float type; `y` is None without labels."""
    if _is_dataset(data):
        batches = [_pair(batch) for batch in items_of(data)]
        if not batches:
            raise ValueError("`metric_data` has no batches. Pass at least one.")
        x, y = keras.tree.map_structure(
            lambda *parts: None if parts[0] is None else np.concatenate(parts), *batches
        )
        return x, y
    return _pair(data)


def _pair(data) -> tuple:
    if isinstance(data, list | tuple) and not data:
        raise ValueError("`metric_data` is empty. Pass inputs, or (inputs, targets).")
    x, y, _ = keras.utils.unpack_x_y_sample_weight(
        tuple(data) if isinstance(data, list | tuple) else data
    )
    return keras.tree.map_structure(_as_array, (x, y))


def _as_array(value):
    if value is None:
        return None
    if not getattr(value, "shape", ()):
        raise ValueError(
            "`metric_data` must be arrays with an axis of rows, `(x, y)`, or batches "
            f"of them. Received {value!r} among them."
        )
    array = np.asarray(ops.convert_to_numpy(value))
    floating = array.dtype.kind == "f"
    return array.astype(keras.config.floatx()) if floating else array


def _is_dataset(data) -> bool:
    if isinstance(data, list):
        return bool(data) and all(isinstance(batch, tuple) for batch in data)
    return not isinstance(data, tuple | dict | str) and not hasattr(data, "shape")
