"""Gradient descent with centred inputs."""

from typing import NamedTuple

import keras
from keras import ops

from keras_secondorder import vectors
from keras_secondorder.arguments import check_momentum
from keras_secondorder.capture import of_wrapper, places_of, plan_blocks
from keras_secondorder.curvature import center, input_mean, uncenter
from keras_secondorder.likelihoods import example_weights
from keras_secondorder.optimizers.base import SecondOrderOptimizer, StepResult


class Seen(NamedTuple):
    """What one layer saw of a batch.

    Attributes:
        inputs: Its inputs as recorded, one for each call.
        taps: Gradients of the loss at its pre-activations, where they are asked for.
        weights: Weights of the examples, which sum to 1.
    """

    inputs: list
    taps: list
    weights: object


@keras.saving.register_keras_serializable(package="keras_secondorder")
class CenteredSGD(SecondOrderOptimizer):
    """Gradient descent on weights that see their inputs without the mean.

    For an affine layer `s = a K + b` with pre-activation gradient `g`:

    ```
    dK = E[(a - mean)^T g]              # mean over the batch
    db = E[g] - mean dK                 # the bias follows: s = (a - mean) K + c
    d  = momentum * d_previous + [dK; db]
    W -= learning_rate * d
    ```

    The network is the same function; only the direction of steepest descent is
    another. Variables of layers without a bias, or that are not affine, take plain
    gradient steps. It costs one product of vectors for each layer beside the gradient.

    Args:
        learning_rate: A number or a Keras schedule.
        momentum: A number in [0, 1).
        **kwargs: Keras's shared arguments (`weight_decay`, `use_ema`, ...).

    Raises:
        ValueError: A number outside its range.

    Example:
        >>> import keras, keras_secondorder as kso
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile(optimizer=kso.CenteredSGD(0.1), loss="mse")
        >>> x = 3.0 + keras.random.normal((64, 4), seed=0)  # plain descent diverges
        >>> history = model.fit(x, x[:, :1], epochs=50, verbose=0)
        >>> history.history["loss"][-1] < 0.01
        True

    References:
        George (2017), thesis, section 6.3 and algorithm 2. The mean is that of the
        batch, with the weights that its examples have in the loss.
    """

    def __init__(self, learning_rate=0.01, momentum: float = 0.0, **kwargs):
        check_momentum(momentum)
        super().__init__(learning_rate, **kwargs)
        self.momentum = momentum

    def build_state(self, model):
        """Create the previous direction."""
        plan = plan_blocks(model, "gradient")
        self.layers = [b for b in plan if b.kind == "kronecker"]
        self._places = places_of(self.layers, model)
        self.previous = [
            self.add_variable(v.shape, "zeros", "float32", name=f"direction_{i}")
            for i, v in enumerate(model.trainable_variables if self.momentum else ())
        ]

    @property
    def wrappers(self):
        """The layers that are watched during a step."""
        return [b.wrapper for b in self.layers]

    def step(self, objective) -> StepResult:
        """One step on one batch."""
        linear = objective.linearize(taps=self._needs_taps)
        gradient, taps = objective.gradient(linear)
        finite = ops.logical_and(
            ops.isfinite(linear.outputs[0]), vectors.is_finite(gradient)
        )
        weights = example_weights(linear.aux.weights, objective.examples)
        seen = [
            Seen(linear.aux.inputs.get(i, []), of_wrapper(taps, i), weights)
            for i in range(len(self.layers))
        ]
        self.observe(seen, finite)
        direction = [ops.cast(g, "float32") for g in gradient]
        for i, places in enumerate(self._places):
            if not seen[i].inputs:
                continue
            wrapper = self.layers[i].wrapper
            parts = wrapper.split([direction[j] for j in places])
            for k, part in enumerate(wrapper.parts):
                if not part.one_hot:
                    U = self.transformed(i, k, part.to_matrix(parts[k]), seen[i])
                    parts[k] = part.from_matrix(U)
            for j, new in zip(places, wrapper.join(parts), strict=True):
                direction[j] = new
        successive = 0.0
        if self.momentum:
            previous = vectors.values(self.previous)
            direction = vectors.axpy(self.momentum, previous, direction)
            finite = ops.logical_and(finite, vectors.is_finite(direction))
            successive = vectors.cosine(direction, previous)
            vectors.assign(self.previous, direction, where=finite)
        loss, state = linear.outputs[0], linear.aux.state
        return StepResult(
            direction, finite, state, self.logs(), loss, gradient, successive
        )

    _needs_taps = False

    def observe(self, seen: list, finite) -> None:
        """Take statistics of a batch; none here.

        Args:
            seen: What each layer saw.
            finite: Whether the batch may be used, a boolean scalar.
        """

    def transformed(self, i: int, k: int, W, seen: Seen):
        """The direction of one affine map.

        Args:
            i: Number of the layer.
            k: Number of the map in its layer.
            W: The gradient as a matrix `(d_in, d_out)`.
            seen: What the layer saw.
        """
        part = self.layers[i].wrapper.parts[k]
        mean = input_mean(part, seen.inputs, seen.weights)
        return uncenter(center(W, mean, part.has_bias), mean, part.has_bias)

    def logs(self) -> dict:
        """Scalars for the logs of `fit`."""
        return {}
