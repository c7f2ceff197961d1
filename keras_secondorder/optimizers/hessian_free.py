"""Hessian-free optimisation: Newton steps by conjugate gradients."""

import keras
from keras import ops

from keras_secondorder import chunks, vectors
from keras_secondorder.arguments import (
    check_at_least,
    check_count,
    check_one_of,
    check_range,
)
from keras_secondorder.capture import recurrent_layers
from keras_secondorder.curvature import BlockDiagonal
from keras_secondorder.curvature.products import (
    fisher_products,
    gauss_newton_products,
    hessian_products,
)
from keras_secondorder.curvature.squared_gradients import (
    DIAGONALS,
    curvature_diagonal,
    dense_wrappers,
)
from keras_secondorder.optimizers.truncated_newton import Trial, TruncatedNewton
from keras_secondorder.solvers import backtrack, conjugate_gradient
from keras_secondorder.solvers.schedules import at_step

CURVATURES = {
    "gauss_newton": gauss_newton_products,
    "fisher": fisher_products,
    "hessian": hessian_products,
}
PRECONDITIONERS = (*DIAGONALS, "kronecker", None)
DAMPING_MATRICES = ("identity", "diagonal")
# Share of the mean of the diagonal that is added to it in scale-sensitive damping.
DIAGONAL_FLOOR = 0.1


@keras.saving.register_keras_serializable(package="keras_secondorder")
class HessianFree(TruncatedNewton):
    """Hessian-free optimisation (Martens).

    ```
    B     = C + lambda D                      # C on a part of the batch
    x     = conjugate_gradient(B, -g, start at zeta x_previous, preconditioner M)
    delta = the kept iterate of x with the least loss on another part of the batch
    t     = backtracking line search along delta, there
    theta += learning_rate * t * delta
    lambda  follows  rho = (h(theta + t delta) - h(theta)) / M(t delta)
    ```

    It wants batches of a thousand examples or more, and few, large steps.

    Args:
        learning_rate: A number or a Keras schedule; 1 takes the step as found.
        curvature: `C`: "gauss_newton", "fisher" or "hessian". The last may be
            indefinite; CG stops where it meets negative curvature.
        damping: `lambda`: an `AdaptiveDamping` object, a number or a schedule.
            "auto" is `AdaptiveDamping(None, every=1, decay=2/3, minimum=1e-6)`.
        damping_matrix: `D`: "identity", or "diagonal" for the diagonal of `C`
            (scale-sensitive damping).
        structural_damping: `mu`: adds `lambda mu` times the curvature of the squared
            change of the activations of recurrent layers, 0 for none.
        structural_layers: Names of the layers whose activations it is, in place of
            all recurrent ones.
        preconditioner: `M = (d + lambda)^0.75` with the diagonal `d` of the
            "empirical" Fisher matrix or of the "gauss_newton" matrix; "kronecker" for
            the damped Kronecker factors of K-FAC; or None.
        warm_start: `zeta`, a number or a schedule.
        cg_iterations: Most CG iterations for a step.
        cg_tolerance: Relative progress for an iteration at which CG stops.
        curvature_fraction: Share of the batch for `C`; at least 64 rows.
        selection_fraction: Share of the batch that chooses the iterate, the length and
            the damping; other examples than those for `C` where it can be.
        chunk_size: Most examples that the loss, its gradient and products with `C` are
            computed for at once, so that a large batch fits in memory; None for all.
            The step is the same up to rounding and up to what is drawn at random:
            dropout has the same masks in each chunk. Not with preconditioner=
            "kronecker", nor where layers or losses normalise over the batch.
        seed: Seed of what is random in the preconditioner.
        **kwargs: Keras's shared arguments.

    Raises:
        ValueError: Arguments that do not go together.

    Example:
        >>> import keras, keras_secondorder as kso
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile(optimizer=kso.HessianFree(), loss="mse")
        >>> x = keras.random.normal((64, 4), seed=0)
        >>> history = model.fit(x, x[:, :1], batch_size=64, epochs=12, verbose=0)
        >>> history.history["loss"][-1] < 1e-4
        True

    References:
        Martens (2010); Martens & Sutskever (2011, 2012); Martens (2016), thesis,
        chapter 4. The reduction ratio is measured on the part of the batch that
        selects, and the exponent 0.75 of the preconditioner is fixed.
    """

    def __init__(
        self,
        learning_rate=1.0,
        curvature: str = "gauss_newton",
        damping="auto",
        damping_matrix: str = "identity",
        structural_damping: float = 0.0,
        structural_layers=None,
        preconditioner: str | None = "empirical",
        warm_start=0.95,
        cg_iterations: int = 250,
        cg_tolerance: float = 5e-4,
        curvature_fraction: float = 0.25,
        selection_fraction: float = 0.25,
        chunk_size: int | None = None,
        seed: int = 0,
        **kwargs,
    ):
        check_one_of("curvature", curvature, tuple(CURVATURES))
        check_one_of("damping_matrix", damping_matrix, DAMPING_MATRICES)
        check_one_of("preconditioner", preconditioner, PRECONDITIONERS)
        check_at_least("structural_damping", structural_damping, 0)
        check_count("cg_iterations", cg_iterations)
        check_range("cg_tolerance", cg_tolerance, 0)
        schedule = keras.optimizers.schedules.LearningRateSchedule
        if not isinstance(warm_start, schedule):
            check_at_least("warm_start", warm_start, 0, 1)
        check_range("curvature_fraction", curvature_fraction, 0, 1)
        if chunk_size is not None:
            check_count("chunk_size", chunk_size)
        if chunk_size and preconditioner == "kronecker":
            raise ValueError(
                "Kronecker factors are estimated in one pass over the batch. Received "
                f"preconditioner='kronecker' with chunk_size={chunk_size}. Use "
                "preconditioner='empirical'."
            )
        if curvature == "hessian" and structural_damping:
            raise ValueError(
                "Structural damping adds to a Gauss-Newton product. Received "
                f"structural_damping={structural_damping} with curvature='hessian'. "
                "Use curvature='gauss_newton'."
            )
        if isinstance(structural_layers, str):
            raise ValueError(
                "`structural_layers` is a list of names. Received "
                f"structural_layers={structural_layers!r}. Put it into a list."
            )
        if structural_layers and not structural_damping:
            raise ValueError(
                "`structural_layers` names the layers that structural damping acts on. "
                f"Received structural_layers={structural_layers} with "
                "structural_damping=0. Give it a positive number too."
            )
        super().__init__(learning_rate, damping, selection_fraction, **kwargs)
        self.curvature = curvature
        self.damping_matrix = damping_matrix
        self.structural_damping = structural_damping
        self.structural_layers = structural_layers
        self.preconditioner = preconditioner
        self.warm_start = warm_start
        self.cg_iterations = cg_iterations
        self.cg_tolerance = cg_tolerance
        self.curvature_fraction = curvature_fraction
        self.chunk_size = chunk_size
        self.seed = seed

    @classmethod
    def short_runs(cls, cg_iterations: int = 30, **kwargs):
        """Few CG iterations from a start that is trusted more and more.

        With such short runs the warm start acts as momentum does, and the method comes
        close to a first-order one with a good metric: a recipe for noisy batches.

        Args:
            cg_iterations: 25 to 50.
            **kwargs: Constructor arguments that replace those of the recipe.

        References:
            Martens (2016), thesis, section 4.8; Sutskever, Martens, Dahl & Hinton
            (2013), section 5.
        """
        rising = keras.optimizers.schedules.PiecewiseConstantDecay(
            [10, 30, 100, 300], [0.5, 0.75, 0.9, 0.95, 0.99]
        )
        settings = {"warm_start": rising, "cg_iterations": cg_iterations}
        return cls(**{**settings, **kwargs})

    def build_state(self, model):
        """Create the last CG solution, the scalars and Kronecker factors if wanted."""
        super().build_state(model)
        if self.chunk_size:
            chunks.check_chunks(model)
        self._watched = self._structural(model)
        self._start = self.add_variable(
            (self.size,), "zeros", self.precision, name="cg_start"
        )
        self._factors = None
        if self.preconditioner == "kronecker":
            self._factors = BlockDiagonal(
                model, self.add_variable, compiled=self.compiled_by_xla
            )
            self.wrappers = tuple(self._factors.wrappers)
        elif self._needs_diagonal:
            self.wrappers = dense_wrappers(model)

    def _structural(self, model):
        if not self.structural_damping:
            return ()
        if self.structural_layers:
            return tuple(model.get_layer(name) for name in self.structural_layers)
        layers = tuple(recurrent_layers(model))
        if not layers:
            raise ValueError(
                "Structural damping acts on the activations of recurrent layers, and "
                f"the model '{model.name}' has none. Received "
                f"structural_damping={self.structural_damping}. Name the layers in "
                "`structural_layers`."
            )
        return layers

    def needs_taps(self, objective):
        """Whether the gradient's pass is the one that Kronecker factors come from."""
        whole = objective.whole_batch(self.curvature_fraction)
        return self._factors is not None and whole

    def propose(self, objective, linear, gradient, damping, k) -> Trial:
        """Conjugate gradients, then the best of their iterates on other examples."""
        part = objective.part(self.curvature_fraction)
        multiply, diagonal = self._curvature(part, damping, k)
        D = 1.0
        if self.damping_matrix == "diagonal":
            # The mean keeps the damping of parameters that see no data above zero;
            # a loss without curvature is damped by the identity.
            mean = ops.mean(diagonal)
            D = ops.where(mean > 0, diagonal + DIAGONAL_FLOOR * mean, 1.0)

        def product(x):
            return multiply(x) + damping * D * x

        (start,) = vectors.values([self._start])
        start = ops.cast(at_step(self.warm_start, k), self.precision) * start
        # A start that the model rates below no step at all would be a step uphill.
        q = 0.5 * ops.sum(start * product(start)) + ops.sum(gradient * start)
        start = ops.where(q <= 0, start, ops.zeros_like(start))
        solution = conjugate_gradient(
            product,
            -gradient,
            start,
            preconditioner=self._preconditioner(
                objective, linear, diagonal, damping, k
            ),
            max_iterations=self.cg_iterations,
            epsilon=self.cg_tolerance,
        )
        change = self.change_of(objective)
        chosen = backtrack(change, solution.iterates)
        slope = ops.sum(gradient * chosen.x)
        q = ops.take(solution.iterates.q, chosen.row)
        logs = {
            "cg_iterations": solution.iterations,
            "cg_iterate": chosen.number,
            "cg_residual": ops.divide_no_nan(
                solution.residual_norm, ops.sqrt(ops.sum(gradient * gradient))
            ),
            "cg_status": solution.status,
        }
        # q = 1/2 x^T B x + g^T x
        carried = ((self._start, solution.x),)
        damped = damping * ops.sum(D * chosen.x * chosen.x)
        curvature = 2.0 * (q - slope)
        return Trial(chosen.x, slope, curvature, damped, change, logs, carried)

    @property
    def _needs_diagonal(self):
        diagonal = self.damping_matrix == "diagonal"
        return diagonal or self.preconditioner in DIAGONALS

    def _curvature(self, part, damping, k):
        """`x -> C x` for flat vectors, and the diagonal of `C` where it is used."""
        mu = damping * self.structural_damping if self._watched else None
        kind = self.preconditioner
        if kind not in DIAGONALS:
            kind = "gauss_newton"

        def network_of(batch, taps):
            return batch.linearize_network(taps, self._watched)

        def products(batch, network=None):
            if self.curvature == "hessian":
                return hessian_products(batch)
            network = network or network_of(batch, False)
            return CURVATURES[self.curvature](batch, network, mu)

        def diagonal_of(batch, network=None):
            network = network or network_of(batch, True)
            return curvature_diagonal(batch, network, kind, self.seed, k)

        if self.chunk_size:
            zeros = [ops.zeros(p.shape, self.precision) for p in part.parameters]

            def over_chunks(f):
                return chunks.mean(part, self.chunk_size, f, zeros)

            def product(v):
                return over_chunks(lambda chunk: products(chunk).product(v))

            diagonal = over_chunks(diagonal_of) if self._needs_diagonal else None
        else:
            network = None
            if self.curvature != "hessian" or self._needs_diagonal:
                network = network_of(part, self._needs_diagonal)
            product = products(part, network).product
            diagonal = diagonal_of(part, network) if self._needs_diagonal else None

        def multiply(x):
            return self.flatten(product(self.unflatten(x)))

        return multiply, None if diagonal is None else self.flatten(diagonal)

    def _preconditioner(self, objective, linear, diagonal, damping, k):
        """`r -> M^-1 r`, or None."""
        if self.preconditioner is None:
            return None
        if self._factors is None:
            M = (diagonal + damping) ** 0.75
            return lambda r: r / M
        self._factors.update(
            vectors.is_finite(linear.outputs),
            0.95,
            objective,
            linear,
            fisher="sampled",
            fraction=self.curvature_fraction,
            seed=self.seed,
            counter=k,
        )
        inverses = self._factors.damped_inverses(ops.sqrt(damping))
        self._factors.keep_inverses(inverses)

        def precondition(r):
            U = self._factors.precondition(
                self.unflatten(r), inverses, damping, linear.aux.inputs, {}
            )
            return self.flatten(U)

        return precondition
