"""The method of Levenberg and Marquardt, with the dense Gauss-Newton matrix."""

import math

import keras
from keras import ops

from keras_secondorder import vectors
from keras_secondorder.arguments import check_one_of
from keras_secondorder.capture import l2_curvature
from keras_secondorder.curvature.products import gauss_newton_products
from keras_secondorder.likelihoods import curvature_cotangents
from keras_secondorder.optimizers.dense_newton import (
    MAX_ROWS,
    DenseNewton,
    Quadratic,
    rows,
)
from keras_secondorder.solvers.damping import AdaptiveDamping

DAMPING_MATRICES = ("diagonal", "identity")
FORMS = ("auto", "primal", "dual")
# The second derivative of the outputs along a step: its difference quotient, and the
# longest correction that is believed, as a share of the step (Transtrum & Sethna).
DIFFERENCE = 0.1
MAX_BEND = 0.375


@keras.saving.register_keras_serializable(package="keras_secondorder")
class LevenbergMarquardt(DenseNewton):
    """The method of Levenberg and Marquardt, for small models.

    ```
    G = J^T H_z J,   D = max(D, diag G),   T = D^-1/2
    T G T = Q diag(e) Q^T                                # primal: P x P
    J^T H_z J = R R^T,   R^T T^2 R = V diag(e) V^T,   Q = T R V e^-1/2    # dual: M x M
    delta  = -T Q (e + lambda)^-1 Q^T T g
    delta += -1/2 (G + lambda D)^-1 J^T H_z z''          # z'' along delta, if short
    rho    = (h(theta + delta) - h(theta)) / (g^T delta + 1/2 delta^T G delta)
    lambda from rho, and again, until h falls;   theta += learning_rate delta
    ```

    It is for up to a few hundred parameters or residuals and for losses that can be
    fitted closely; the full batch, `fit(batch_size=len(x))`, or large ones. Any loss
    with a Gauss-Newton matrix will do, not only squared errors.

    Args:
        learning_rate: A number or a Keras schedule; 1 takes the step as found.
        damping: `lambda`: an `AdaptiveDamping`, which moves at each trial; a number or
            a schedule, with which each step is taken as it is. "auto" is
            `AdaptiveDamping(1e-3, every=1, decay=1/2, minimum=1e-7)`, and with the
            identity `AdaptiveDamping(None, every=1, decay=1/2, minimum=1e-12)`.
        damping_matrix: `D`: "diagonal", the largest diagonal of `G` so far, under
            which `lambda` has no unit; or "identity".
        form: "primal" for the matrix of the `P` parameters; "dual" for that of the `M`
            residuals, examples times outputs, which takes no L2 penalty; "auto" for
            the smaller one, where the size of the batch is known before it comes: not
            on TensorFlow.
        acceleration: Whether a step bends with the outputs.
        trials: Most `lambda` that are tried in a step; the weights stay where none
            makes the loss fall.
        **kwargs: Keras's shared arguments.

    Raises:
        ValueError: Arguments out of range; in `fit`, a matrix of more than 5,000 rows,
            or an L2 penalty in the dual form.

    Example:
        >>> import keras, keras_secondorder as kso
        >>> x = keras.ops.reshape(keras.ops.linspace(-1.0, 1.0, 100), (-1, 1))
        >>> keras.utils.set_random_seed(0)
        >>> model = keras.Sequential(
        ...     [
        ...         keras.Input((1,)),
        ...         keras.layers.Dense(6, activation="tanh"),
        ...         keras.layers.Dense(1),
        ...     ]
        ... )
        >>> model.compile(optimizer=kso.LevenbergMarquardt(), loss="mse")
        >>> y = keras.ops.sin(4.0 * x)
        >>> history = model.fit(x, y, batch_size=100, epochs=60, verbose=0)
        >>> history.history["loss"][-1] < 1e-3
        True

    References:
        Levenberg (1944); Marquardt (1963); More (1978), section 6, for `D`. Nocedal &
        Wright (2006), section 10.3. Transtrum & Sethna (2012), sections 2 and 4, for
        the acceleration, here with `H_z` for losses other than squared errors; a
        correction that is too long is left out, and the step is tried without it.
    """

    def __init__(
        self,
        learning_rate=1.0,
        damping="auto",
        damping_matrix: str = "diagonal",
        form: str = "auto",
        acceleration: bool = True,
        trials: int = 10,
        **kwargs,
    ):
        check_one_of("damping_matrix", damping_matrix, DAMPING_MATRICES)
        check_one_of("form", form, FORMS)
        super().__init__(learning_rate, damping, trials, **kwargs)
        self.damping_matrix = damping_matrix
        self.form = form
        self.acceleration = acceleration

    @property
    def auto_damping(self):
        """What `damping="auto"` stands for."""
        scaled = self.damping_matrix == "diagonal"
        initial, minimum = (1e-3, 1e-7) if scaled else (None, 1e-12)
        return AdaptiveDamping(initial, 1, 0.5, minimum, gamma_every=None)

    def build_state(self, model):
        """Create the largest diagonal so far."""
        super().build_state(model)
        self._penalised = any(l2_curvature(v) for v in model.trainable_variables)
        self.largest_diagonal = None
        if self.damping_matrix == "diagonal":
            self.largest_diagonal = self.add_variable(
                (self.size,), "zeros", self.precision, name="largest_diagonal"
            )

    def quadratic(self, objective):
        """The Gauss-Newton matrix, taken apart in one of two ways."""
        network = objective.linearize_network()
        G = gauss_newton_products(objective, network)
        sizes = [math.prod(shape) for shape in G.root_shapes]
        is_dual = self._is_dual(sum(sizes))
        if is_dual:
            R = self._root(G, sizes)
            T, carried = self._scale(ops.sum(R * R, axis=1))
            R = R * ops.expand_dims(T, 1)
            e, V = self.eigh(ops.transpose(R) @ R)
            usable = e > self.eps * ops.max(e)
            e = ops.where(usable, e, 0.0)
            Q = R @ (V * ops.where(usable, 1 / ops.sqrt(ops.where(usable, e, 1)), 0))
        else:
            matrix = self.dense(G.product)
            T, carried = self._scale(ops.diag(matrix))
            matrix = matrix * ops.expand_dims(T, 0) * ops.expand_dims(T, 1)
            e, Q = self.eigh(matrix)
            e = ops.where(e > 0, e, 0.0)  # less is rounding
        bend = self._bend(objective, network) if self.acceleration else None
        return Quadratic(e, Q, T, bend, carried, complete=not is_dual)

    def _is_dual(self, residuals):
        """Which form a batch with so many residuals takes."""
        known = isinstance(residuals, int)
        if self.form == "auto":
            return known and 0 < residuals < self.size and not self._penalised
        if self.form == "dual" and self._penalised:
            raise ValueError(
                "The dual form has no room for the curvature of a penalty. Received "
                "form='dual' and a model with an L2 penalty. Use form='primal'."
            )
        if self.form == "dual" and known and residuals > MAX_ROWS:
            raise ValueError(
                f"The dual form takes apart a matrix of at most {MAX_ROWS} rows. "
                f"Received a batch with {residuals} residuals. Use form='primal', or "
                "smaller batches."
            )
        return self.form == "dual"

    def _root(self, G, sizes):
        """`R`, shape `(P, M)`, one column for each residual."""
        count = sum(sizes)
        numbers = ops.arange(count, dtype="int32")

        def row(i):
            unit = ops.cast(ops.equal(numbers, i), self.precision)
            parts, start = [], 0
            for shape, size in zip(G.root_shapes, sizes, strict=True):
                parts.append(ops.reshape(unit[start : start + size], shape))
                start = start + size
            return self.flatten(G.root(parts))

        return ops.transpose(rows(row, count))

    def _scale(self, diagonal):
        """`(T, what is carried)` from the diagonal of `G`."""
        if self.largest_diagonal is None:
            return ops.ones_like(diagonal), ()
        (before,) = vectors.values([self.largest_diagonal])
        D = ops.where(diagonal > before, diagonal, before)
        # A parameter that moves nothing has no scale of its own, and at most the
        # gradient of a penalty: it takes the steps of the stiffest one.
        top = ops.max(D)
        stiff = ops.where(top > 0, top, 1.0)
        T = 1 / ops.sqrt(ops.where(D > self.eps * stiff, D, stiff))
        return T, ((self.largest_diagonal, D),)

    def _bend(self, objective, network):
        """`(delta, solve) -> delta` with the second-order correction."""
        outputs = network.outputs
        curves = objective.curves(outputs, network.aux[0])

        def bend(delta, solve):
            v = self.unflatten(delta)
            ahead = objective.outputs(
                objective.moved([DIFFERENCE * part for part in v])
            )
            bends = [
                2 / DIFFERENCE * ((there - z) / DIFFERENCE - tangent)
                for there, z, tangent in zip(
                    ahead, outputs, network.push(v), strict=True
                )
            ]
            cotangents = curvature_cotangents(curves, outputs, bends)
            more = -0.5 * solve(self.flatten(network.pullback(cotangents)))
            length, most = (ops.sqrt(ops.sum(s * s)) for s in (more, delta))
            return delta + ops.where(length <= MAX_BEND * most, more, 0.0)

        return bend
