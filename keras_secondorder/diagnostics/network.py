"""The curvature of a whole network on one batch, measured again and again."""

from typing import NamedTuple

import keras
import numpy as np
from keras import ops

from keras_secondorder import autodiff, vectors
from keras_secondorder.curvature import Density, gauss_newton, hessian
from keras_secondorder.curvature.batches import Batches
from keras_secondorder.curvature.compiled_model import build_loss
from keras_secondorder.curvature.operator import MAX_EXACT_PRODUCTS
from keras_secondorder.diagnostics.measures import (
    NoiseScale,
    Shares,
    noise_scale,
    shares,
    subspace_share,
)
from keras_secondorder.likelihoods import loss_weights_of
from keras_secondorder.objective import Objective, state_variables

RANDOM_DIRECTIONS = 4


class Spectrum(NamedTuple):
    """The outer eigenvalues of a matrix, and its trace.

    Attributes:
        top: The largest in magnitude, the largest first; NumPy array `(k,)`.
        trace: An estimate of the trace.
    """

    top: np.ndarray
    trace: float


class NetworkProbe:
    """What there is to see of a model's curvature on one batch.

    Each method looks at the weights that the model has when it is called. What a
    backend compiles is compiled once, in the first call.

    Args:
        model: A compiled and built Keras model.
        x: Inputs, arrays.
        y: Targets, arrays.
        sample_weight: Weights of the examples, or None.
        top: How many eigenvalues to look for.
        parts: Number of equal parts of the batch for the noise of the gradient.
        seed: Seed of random vectors.
        training: Whether layers are in training mode, as they are in a step.

    Raises:
        ValueError: The batch has fewer examples than parts.
    """

    def __init__(
        self, model, x, y, sample_weight=None, top=5, parts=8, seed=0, training=False
    ):
        self._model, self._seed, self._training = model, seed, training
        self._data = x, y, sample_weight
        rows = len(keras.tree.flatten(x)[0])
        parts = min(parts, rows)
        if parts < 2:
            raise ValueError(
                "The noise of a gradient shows between examples. Received a batch with "
                f"{rows} of them. Give at least two, better a few hundred."
            )
        self.part_size = rows // parts
        size = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
        self._top = min(top, size)
        self._parts = [
            vectors.take_rows((x, y, sample_weight), np.arange(i, i + self.part_size))
            for i in range(0, parts * self.part_size, self.part_size)
        ]
        self._hessian = self._gauss_newton = self._in_steps = self._compute = None

    def hessian(self) -> tuple[Spectrum, float]:
        """The outer eigenvalues and the trace of the Hessian.

        Returns:
            The `Spectrum`, and the share of the squared gradient that lies in the space
            of these eigenvectors.
        """
        H = self._hessian = self._at_present(self._hessian, hessian)
        pairs = H.eigenpairs(self._top, rtol=1e-2, max_products=200, seed=self._seed)
        share = subspace_share(
            self._flat(self.gradient()), ops.convert_to_numpy(pairs.vectors)
        )
        return self._spectrum(H, pairs.values), share

    def gauss_newton(self) -> Spectrum:
        """The largest eigenvalues and the trace of the Gauss-Newton matrix."""
        G = self._gauss_newton = self._at_present(self._gauss_newton, gauss_newton)
        values = G.eigenvalues(self._top, rtol=1e-2, max_products=200, seed=self._seed)
        return self._spectrum(G, values)

    def density(self, samples: int = 1, steps: int = 48) -> Density:
        """The density of the Hessian's eigenvalues.

        Args:
            samples: Number of random starting vectors.
            steps: Lanczos steps from each.
        """
        H = self._hessian = self._at_present(self._hessian, hessian)
        return H.spectral_density(samples, steps, seed=self._seed)

    def shares(self, density: Density) -> Shares:
        """The shares of the Hessian's eigenvalues that stand out from zero.

        Args:
            density: What `density` returned at the same weights; for more than 512
                parameters, the shares are estimates from its nodes.
        """
        H = self._hessian = self._at_present(self._hessian, hessian)
        if H.shape[0] > MAX_EXACT_PRODUCTS:
            return shares(density.nodes, density.weights, exact=False)
        H = ops.convert_to_numpy(H.to_dense()).astype(float)
        e = np.linalg.eigvalsh((H + H.T) / 2)
        return shares(e, np.full(e.shape, 1 / len(e)), exact=True)

    def noise(self) -> NoiseScale:
        """The gradient noise scale, from the gradients of equal parts of the batch."""
        parts = np.stack([self._flat(g) for g in self._part_gradients()])
        return noise_scale(parts, self.part_size)

    def gradient(self) -> list:
        """The gradient of the objective, one tensor for each trainable variable."""
        parts = self._part_gradients()
        return [sum(tensors) / len(parts) for tensors in zip(*parts, strict=True)]

    def approximation_errors(self, optimizer) -> dict:
        """How far an optimizer's approximate curvature is from the Gauss-Newton matrix.

        ```
        error(v) = v^T F_approx v / (v^T F v) - 1
        ```

        without damping and penalties: 0 is perfect, -0.5 half of the curvature. `F` is
        that of this batch, in training mode as in a step, the approximation the
        optimizer's running average.

        Args:
            optimizer: A built `KFAC`.

        Returns:
            The errors along the last "update", the "gradient" and, on average, in
            "random" directions.
        """
        G = self._in_steps = self._at_present(self._in_steps, gauss_newton, True)
        curvature = optimizer.curvature
        random = np.random.default_rng(self._seed)
        directions = {
            "update": [vectors.values(optimizer.previous)],
            "gradient": [self.gradient()],
            "random": [
                [
                    ops.convert_to_tensor(random.normal(size=s), "float32")
                    for s in G.shapes
                ]
                for _ in range(RANDOM_DIRECTIONS)
            ],
        }
        errors = {}
        for name, group in directions.items():
            found = []
            for v in group:
                penalty = sum(
                    eta * float(ops.sum(a * a))
                    for eta, a in zip(curvature.eta, v, strict=True)
                )
                exact = float(vectors.dot(v, G @ v)) - penalty
                approximate = float(vectors.dot(v, curvature.multiply(v)))
                if exact > 0:
                    found.append(approximate / exact - 1.0)
            if found:
                errors[name] = float(np.mean(found))
        return errors

    def _at_present(self, operator, build, training=None):
        if operator is not None:
            return operator.refresh()
        training = self._training if training is None else training
        return build(self._model, *self._data, training=training)

    def _spectrum(self, operator, values) -> Spectrum:
        few = operator.shape[0] <= MAX_EXACT_PRODUCTS
        trace = operator.trace(samples=None if few else 24, seed=self._seed)
        return Spectrum(ops.convert_to_numpy(values).astype(float), float(trace))

    def _flat(self, v: list) -> np.ndarray:
        return np.concatenate([np.ravel(ops.convert_to_numpy(a)) for a in v])

    def _part_gradients(self) -> list:
        if self._compute is None:
            self._compute = _gradient_function(self._model, self._parts, self._training)
        return self._compute()


def _gradient_function(model, parts, training):
    """A function that takes the gradient of each part at the present weights."""
    batches = list(Batches(model, parts, None, None))
    build_loss(model, batches)
    loss_weights, variables = loss_weights_of(model), list(model.trainable_variables)
    precision = vectors.precision_of(vectors.values(variables))

    def gradient(parameters, state, batch):
        objective = Objective(
            model,
            *batch,
            loss_weights=loss_weights,
            training=training,
            values=(parameters, state),
            precision=precision,
        )
        linear = autodiff.vjp(
            lambda p, tap: ([objective.value(p)], ()), parameters, taps=False
        )
        return linear.pullback([ops.ones_like(linear.outputs[0])])

    compute = autodiff.compiled(gradient)

    def all_gradients():
        values = vectors.values(variables), vectors.values(state_variables(model))
        with autodiff.no_grad():
            return [compute(*values, batch) for batch in batches]

    return all_gradients
