"""One batch as pure functions of the parameters."""

import copy
import functools
import inspect
import math
from typing import NamedTuple

import keras
import numpy as np
from keras import ops

from keras_secondorder import autodiff, vectors
from keras_secondorder.capture import recording, watching
from keras_secondorder.likelihoods import (
    Curve,
    by_position,
    check_likelihood,
    likelihood_of,
    loss_values,
    position_weights,
    read_heads,
    with_shares,
)

MIN_ROWS = 64  # the fewest rows that a fraction of a batch is cut down to
MIN_EXAMPLES = 8  # and the fewest examples, where each has many positions
AUTO = 0.25, 128  # the fraction "auto", and the most examples that it is


class Pass(NamedTuple):
    """What one forward pass carries along beside the loss and the outputs.

    Attributes:
        inputs: Inputs of the wrapped layers, by index.
        weights: One tensor of position weights for each head.
        state: New values of the model's and the metrics' state, in order.
    """

    inputs: dict
    weights: list
    state: list


class Objective:
    """The loss of one batch, its gradient and its curvature.

    Everything is a function of `parameters`, a list of tensors in the order of
    `model.trainable_variables`. The state of the model (batch normalisation
    statistics, seeds of dropout) enters as it was when the object was made, so that
    every evaluation in a step sees the same masks, and no evaluation changes it.

    Args:
        model: A compiled and built Keras model.
        x: Inputs.
        y: Targets.
        sample_weight: Sample weights or None.
        wrappers: Layer wrappers, in the order by which they are recorded.
        loss_weights: The weights of the losses, as compiled.
        loss_scale: What the gradient is computed at a multiple of (mixed precision).
        training: Whether layers such as dropout are in training mode.
        values: `(parameters, state)`: values to use in place of the variables' own.
        precision: Dtype of the loss, the outputs and the gradient.
    """

    def __init__(
        self,
        model,
        x,
        y,
        sample_weight,
        wrappers=(),
        loss_weights=None,
        loss_scale=1.0,
        training=True,
        values=None,
        precision="float32",
    ):
        self.model = model
        self._x, self._y, self._sample_weight = x, y, sample_weight
        self._given_weight = sample_weight  # those of metrics: `on` scales the others
        self.wrappers = wrappers
        self.variables = list(model.trainable_variables)
        self.precision = precision
        self._loss_scale = ops.cast(loss_scale, precision)
        self.state_variables = state_variables(model)
        self._random = autodiff.random_state()
        if values is None:
            values = map(vectors.values, (self.variables, self.state_variables))
        self.parameters, self.state = values
        self._training, self._loss_weights = training, loss_weights
        # Known after a forward pass: the outputs with a loss, and how many there are.
        self.heads = self.output_count = None

    def part(self, fraction: float, shift: int = 0) -> "Objective":
        """The objective on some examples of the batch, as a batch of its own.

        Args:
            fraction: Share of the examples, in (0, 1]; never fewer than 64 rows.
            shift: Python integer; with another one the examples are others.
        """
        if self.whole_batch(fraction):
            return self
        return self.at((self._rows(fraction)[0] + shift) % self.examples)

    def at(self, rows) -> "Objective":
        """The objective on the examples with some indices, as a batch of its own."""
        data = (self._x, self._y, self._sample_weight, self._given_weight)
        *data, given = vectors.take_rows(data, rows)
        other = self.on(*data)
        other._given_weight = given
        return other

    def on(self, x, y, sample_weight) -> "Objective":
        """The objective of other data at the same point; `y` may be None.

        Without weights of their own, the examples have the mean of this batch's.
        Losses that are sums over the batch are scaled to as many examples as this batch
        has.
        """
        other = copy.copy(self)
        other._x, other._y = x, y
        if sample_weight is None and self._sample_weight is not None:
            dtype = self.precision
            ones = ops.ones((other.examples,), dtype)
            sample_weight = keras.tree.map_structure(
                lambda w: None if w is None else ops.mean(ops.cast(w, dtype)) * ones,
                self._sample_weight,
            )
        other._given_weight = sample_weight
        share = self._share_of(other.examples)
        other._sample_weight = with_shares(
            self.model.loss, sample_weight, share, other.examples
        )
        return other

    def _scope(self, parameters):
        autodiff.set_random_state(self._random)
        values = zip(self.variables, parameters, strict=True)
        state = zip(self.state_variables, self.state, strict=True)
        return keras.StatelessScope([*values, *state], collect_losses=True)

    def _evaluate(self, parameters, tap, heads=True):
        """`([h, outputs...], Pass)`, the whole of one training forward pass."""
        with self._scope(parameters) as scope:
            y_pred, inputs = self._call(self._x, tap)
            h = self._loss(y_pred)
            if not isinstance(self.examples, int):  # of none at all, it would be 0
                h = ops.where(self.examples > 0, h, float("nan"))
            self._track_loss(h)
            given = vectors.copies(self._given_weight)
            self.model.compute_metrics(self._x, self._y, y_pred, sample_weight=given)
            outputs = self._flat(y_pred)
            weights = self._position_weights(y_pred, outputs) if heads else []
            state = [scope.get_current_value(v) for v in self.state_variables]
        return [h, *outputs], Pass(inputs, weights, state)

    def _call(self, x, tap):
        with recording(self.wrappers, tap) as inputs:
            y_pred = self.model(x, **self._mode(self.model.call))
        return y_pred, dict(inputs)

    def _loss(self, y_pred):
        """`h` at some outputs of the network, penalties included; inside the scope."""
        loss = self.model.compute_loss(
            x=self._x,
            y=self._y,
            y_pred=y_pred,
            sample_weight=vectors.copies(self._sample_weight),
            **self._mode(self.model.compute_loss),
        )
        if loss is None or (self.model.loss is None and not self.model.losses):
            raise ValueError(
                "The model has nothing to minimise. It was compiled without a "
                "loss and adds none itself. Pass `loss=` to `compile`."
            )
        return ops.sum(ops.cast(loss, self.precision))

    def _flat(self, y_pred) -> list:
        return [vectors.cast(z, self.precision) for z in keras.tree.flatten(y_pred)]

    def _position_weights(self, y_pred, outputs):
        weights = vectors.copies(self._sample_weight)
        heads = read_heads(self.model, self._y, y_pred, weights, self._loss_weights)
        self.heads, self.output_count = heads, len(outputs)
        raw = keras.tree.flatten(y_pred)
        return [position_weights(h, outputs[h.output], raw[h.output]) for h in heads]

    def _track_loss(self, h):
        for metric in [m for m in self.model.metrics if m.name == "loss"]:
            metric.update_state(h, sample_weight=self.examples)

    def _mode(self, function) -> dict:
        known = "training" in inspect.signature(function).parameters
        return {"training": self._training} if known else {}

    def linearize(self, taps=False, heads=True) -> autodiff.Linearization:
        """The objective and the outputs, ready for reverse passes.

        Args:
            taps: Whether gradients at the pre-activations will be asked for.
            heads: Whether the losses are taken apart, as curvature needs it.

        Returns:
            A linearisation with outputs `[h, z...]` and a `Pass` as aux.
        """
        evaluate = functools.partial(self._evaluate, heads=heads)
        return autodiff.vjp(evaluate, self.parameters, taps)

    def gradient(self, linear: autodiff.Linearization) -> tuple:
        """The gradient of the objective.

        Args:
            linear: What `linearize` returned.

        Returns:
            `(gradient, gradients at the pre-activations by wrapper index)`.
        """
        seed = [self._loss_scale] + [None] * (len(linear.outputs) - 1)
        gradient, taps = linear.pullback_all(seed)

        def unscale(g):
            return vectors.cast(g, self.precision) / self._loss_scale

        return [unscale(g) for g in gradient], {i: unscale(g) for i, g in taps.items()}

    def value(self, parameters):
        """The objective at other parameters, a scalar."""
        with self._scope(parameters):
            return self._loss(self._call(self._x, _no_tap)[0])

    def uninformed(self, outputs: list, weights: list):
        """The losses of the outputs' own means, the same for all inputs; a scalar.

        Args:
            outputs: Outputs of the network on this batch, flattened.
            weights: Position weights of the heads.
        """
        total = 0.0
        for head, w in zip(self.heads, weights, strict=True):
            z = outputs[head.output]
            rows, share = by_position(z, w), w[..., None]
            if len(w.shape) == 0:  # the loss is one number for the whole batch
                rows, share = z, ops.ones_like(z)
            axes = tuple(range(max(1, len(w.shape))))
            total_share = ops.sum(share, axis=axes, keepdims=True)
            mean = ops.sum(share * rows, axis=axes, keepdims=True)
            mean = ops.divide_no_nan(mean, total_share) + ops.zeros_like(rows)
            values = loss_values(head.loss, head.y, ops.reshape(mean, ops.shape(z)))
            alike = len(values.shape) == len(w.shape)
            total += ops.sum(w * values) if alike else ops.sum(w) * ops.mean(values)
        return total

    def outputs(self, parameters) -> list:
        """The outputs of the network at other parameters, flattened."""
        with self._scope(parameters):
            return self._flat(self._call(self._x, _no_tap)[0])

    def moved(self, update: list) -> list:
        """The parameters `theta + update`, in their own dtypes."""
        return [
            p + vectors.cast(u, p.dtype)
            for p, u in zip(self.parameters, update, strict=True)
        ]

    def change(self, update: list, loss):
        """`h(theta + update) - loss`, on the same batch and the same masks."""
        return self.value(self.moved(update)) - loss

    def curves(
        self, outputs: list, weights: list, rows=None, gradient_only: bool = False
    ) -> list[Curve]:
        """The likelihoods of the heads, for all examples or for some.

        Args:
            outputs: Outputs of the network, flattened, of the examples in question.
            weights: Position weights of the heads, for the same examples.
            rows: Indices of the examples in the batch, or None for all.
            gradient_only: Whether only their gradients are used (empirical Fisher).
        """
        curves = []
        for head, w in zip(self.heads, weights, strict=True):
            y = head.y if rows is None else vectors.take_rows(head.y, rows)
            if not head.labelled:
                check_likelihood(head.loss)
            z = outputs[head.output]
            likelihood = likelihood_of(head.loss, y, z, gradient_only)
            curves.append(Curve(head.output, likelihood, w))
        return curves

    @property
    def examples(self):
        """Number of examples: a Python integer where it is known, else a scalar."""
        tensors = (t for t in keras.tree.flatten(self._x) if t is not None)
        return ops.shape(next(tensors))[0]

    def whole_batch(self, fraction: float) -> bool:
        """Whether a fraction of the batch is known to be all of it."""
        total = self.examples
        few = isinstance(total, int) and total <= self._fewest
        return few or (fraction != "auto" and fraction >= 1.0)

    def subset(self, fraction: float, weights: list) -> tuple:
        """Some examples of the batch, spread evenly over it.

        Args:
            fraction: Share of the examples, in (0, 1], or "auto".
            weights: Position weights of the heads on the whole batch.

        Returns:
            `(x, rows, weights)`, the weights scaled so that sums over the subset
            estimate sums over the batch; `rows` is None for the whole batch.
        """
        if self.whole_batch(fraction):
            return self._x, None, weights
        rows, count = self._rows(fraction)
        scale = self._share_of(count)
        weights = [
            vectors.take_rows(w, rows) * scale if len(w.shape) else w for w in weights
        ]
        return vectors.take_rows(self._x, rows), rows, weights

    def _rows(self, fraction):
        """Indices of a share of the examples, and their number."""
        total = self.examples
        fraction, most = AUTO if fraction == "auto" else (fraction, total)
        if isinstance(total, int):
            count = max(self._fewest, min(most, round(total * fraction)))
            rows = np.arange(count, dtype="int64") * total // count
            return ops.convert_to_tensor(rows.astype("int32")), count
        share = ops.cast(ops.cast(total, "float32") * fraction, "int32")
        share = ops.maximum(ops.minimum(share, most), self._fewest)
        count = ops.minimum(total, share)
        # 64 bits: the products go beyond 2^31 from 93,000 rows on.
        rows = ops.cast(ops.arange(count), "int64") * ops.cast(total, "int64")
        return ops.cast(rows // ops.cast(count, "int64"), "int32"), count

    @property
    def _fewest(self) -> int:
        """The fewest examples with `MIN_ROWS` rows, one for each position."""
        shapes = [t.shape[1:-1] for t in getattr(self.model, "outputs", None) or ()]
        positions = min((math.prod(d or 1 for d in s) for s in shapes), default=1)
        return max(MIN_EXAMPLES, -(-MIN_ROWS // positions))

    def _share_of(self, count):
        """How many examples each of `count` stands for."""
        return ops.cast(self.examples, self.precision) / ops.cast(count, self.precision)

    def linearize_outputs(self, x, taps: bool = True) -> autodiff.Linearization:
        """The outputs alone, for both directions, with no loss.

        Args:
            x: Inputs.
            taps: Whether gradients at the pre-activations will be asked for.

        Returns:
            A linearisation with outputs `[z...]` and the inputs of the wrapped layers
            as aux.
        """

        def network(parameters, tap):
            with self._scope(parameters):
                y_pred, inputs = self._call(x, tap)
                return self._flat(y_pred), inputs

        return autodiff.linearize(network, self.parameters, taps)

    def linearize_network(self, taps=False, watch=()) -> autodiff.Linearization:
        """The outputs on the whole batch, for both directions.

        Args:
            taps: Whether gradients at the pre-activations will be asked for.
            watch: Layers whose activations follow the outputs of the network.

        Returns:
            A linearisation with outputs `[z..., activations...]`. Its aux is the
            position weights of the heads and the inputs of the wrapped layers.
        """

        def network(parameters, tap):
            with self._scope(parameters), watching(watch) as activations:
                y_pred, inputs = self._call(self._x, tap)
                outputs = self._flat(y_pred)
                weights = self._position_weights(y_pred, outputs)
                return outputs + self._flat(activations), (weights, inputs)

        return autodiff.linearize(network, self.parameters, taps)


def state_variables(model) -> list:
    """The variables that a forward pass may read or change, parameters apart."""
    return [*model.non_trainable_variables, *model.metrics_variables]


def _no_tap(name, tensor):
    return tensor
