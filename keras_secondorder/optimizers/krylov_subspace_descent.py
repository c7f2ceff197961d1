"""Krylov subspace descent: the loss itself, minimised in a Krylov subspace."""

import keras
from keras import ops

from keras_secondorder import autodiff, vectors
from keras_secondorder.arguments import (
    check_count,
    check_one_of,
    check_range,
)
from keras_secondorder.curvature.products import fisher_products, gauss_newton_products
from keras_secondorder.optimizers.base import StepResult
from keras_secondorder.optimizers.flat import FlatOptimizer
from keras_secondorder.optimizers.step_report import Measured
from keras_secondorder.solvers import bfgs, lanczos
from keras_secondorder.solvers.result import project_out

CURVATURES = {"gauss_newton": gauss_newton_products, "fisher": fisher_products}
# Share of the largest curvature in the subspace that is added to all of it, so that
# flat directions do not start with endless steps.
FLOOR = 1e-3


@keras.saving.register_keras_serializable(package="keras_secondorder")
class KrylovSubspaceDescent(FlatOptimizer):
    """Krylov subspace descent (Vinyals & Povey).

    ```
    K = orthonormal basis of  {g, C g, ..., C^(m-1) g, previous step}
    T = K^T C K                                      # C on a part of the batch
    c = bfgs( h(theta + K c) on another part,  first inverse Hessian (T + eps I)^-1 )
    theta += learning_rate * K c
    ```

    Nothing is damped: the loss itself says how far to go, in few dimensions.

    Args:
        learning_rate: A number or a Keras schedule; 1 takes the step as found.
        curvature: `C`: "gauss_newton" or "fisher".
        basis_size: `m`, the number of products with `C` for a step, less one.
        bfgs_iterations: Most BFGS updates for a step.
        curvature_fraction: Share of the batch for `C`; at least 64 rows.
        selection_fraction: Share of the batch on which the loss is minimised; other
            examples than those for `C` where it can be.
        **kwargs: Keras's shared arguments.

    Raises:
        ValueError: Arguments out of range.

    Example:
        >>> import keras, keras_secondorder as kso
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile(optimizer=kso.KrylovSubspaceDescent(), loss="mse")
        >>> x = keras.random.normal((64, 4), seed=0)
        >>> history = model.fit(x, x[:, :1], batch_size=64, epochs=8, verbose=0)
        >>> history.history["loss"][-1] < 1e-4
        True

    References:
        Vinyals & Povey (2012), algorithm 1; Pascanu & Bengio (2014), section 4.3. They
        precondition the basis; here `T` starts BFGS in its place.
    """

    def __init__(
        self,
        learning_rate=1.0,
        curvature: str = "gauss_newton",
        basis_size: int = 20,
        bfgs_iterations: int = 20,
        curvature_fraction: float = 0.25,
        selection_fraction: float = 0.25,
        **kwargs,
    ):
        check_one_of("curvature", curvature, tuple(CURVATURES))
        check_count("basis_size", basis_size)
        check_count("bfgs_iterations", bfgs_iterations)
        check_range("curvature_fraction", curvature_fraction, 0, 1)
        check_range("selection_fraction", selection_fraction, 0, 1)
        super().__init__(learning_rate, **kwargs)
        self.curvature = curvature
        self.basis_size = basis_size
        self.bfgs_iterations = bfgs_iterations
        self.curvature_fraction = curvature_fraction
        self.selection_fraction = selection_fraction

    def build_state(self, model):
        """Create the previous step."""
        super().build_state(model)
        self.previous = self.add_variable(
            (self.size,), "zeros", self.precision, name="previous_step"
        )

    def step(self, objective):
        """One step on one batch."""
        linear = objective.linearize()
        loss, gradient, finite = self.loss_and_gradient(objective, linear)
        (previous,) = vectors.values([self.previous])

        part = objective.part(self.curvature_fraction)
        C = CURVATURES[self.curvature](part)

        def product(x):
            return self.flatten(C.product(self.unflatten(x)))

        K, T, used = self._subspace(product, gradient, previous)
        H0 = _damped_inverse(T, used)

        selection = objective.part(self.selection_fraction, shift=1)
        point = self.flatten(selection.parameters)

        def along(c):
            return ops.sum(K * ops.expand_dims(c, 1), axis=0)  # (P,)

        def value_and_gradient(c):
            parameters = [
                ops.cast(new, p.dtype)
                for new, p in zip(
                    self.unflatten(point + along(c)), selection.parameters, strict=True
                )
            ]
            pass_ = autodiff.vjp(
                lambda p, tap: ([selection.value(p)], ()), parameters, taps=False
            )
            (value,) = pass_.outputs
            pulled = self.flatten(pass_.pullback([ops.ones_like(value)]))
            return value, ops.sum(K * ops.expand_dims(pulled, 0), axis=1)

        start = ops.zeros_like(T[0])
        found = bfgs(value_and_gradient, start, H0, max_iterations=self.bfgs_iterations)
        step = along(found.x)
        finite = finite & ops.all(ops.isfinite(step))
        successive = vectors.cosine([step], [previous])
        vectors.assign([self.previous], [step], where=finite)
        logs = {
            "basis": ops.sum(ops.cast(used, "int32")),
            "bfgs_iterations": found.iterations,
            "bfgs_evaluations": found.evaluations,
            "bfgs_status": found.status,
        }
        quadratic = ops.sum(found.x * ops.reshape(T @ found.x[:, None], (-1,)))
        predicted = ops.sum(gradient * step) + 0.5 * quadratic
        return StepResult(
            self.unflatten(-step),
            finite,
            linear.aux.state,
            logs,
            loss,
            self.unflatten(gradient),
            successive,
            Measured(predicted, found.change, quadratic),
        )

    def _subspace(self, product, gradient, previous) -> tuple:
        """`(K, K C K^T, which rows are in use)`, with the basis in the rows of `K`."""
        found = lanczos(product, -gradient, self.basis_size)
        Q, m = found.basis, self.basis_size
        # The previous step, made orthogonal to the rest; nothing of it may remain.
        w = project_out(previous, Q)
        length = ops.sqrt(ops.sum(w * w))
        usable = length > 1e-5 * ops.sqrt(ops.sum(previous * previous))
        w = ops.where(usable, w / ops.where(usable, length, 1.0), ops.zeros_like(w))
        Cw = product(w)
        K = ops.concatenate([Q, ops.expand_dims(w, 0)])

        numbers = ops.arange(m, dtype="int32")
        beside = ops.where(numbers < found.count - 1, found.betas, 0.0)[: m - 1]
        T = ops.diag(found.alphas) + ops.diag(beside, 1) + ops.diag(beside, -1)
        column = _rows_dot(Q, Cw)
        corner = ops.reshape(ops.sum(w * Cw), (1, 1))
        T = ops.concatenate([T, ops.expand_dims(column, 0)])
        side = ops.concatenate([ops.expand_dims(column, 1), corner])
        T = ops.concatenate([T, side], axis=1)
        used = ops.concatenate([numbers < found.count, ops.reshape(usable, (1,))])
        return K, T, used


def _rows_dot(Q, w):
    return ops.sum(Q * ops.expand_dims(w, 0), axis=1)


def _damped_inverse(T, used):
    """`(|T| + eps I)^-1` on the rows in use, zero on the others.

    Without any curvature it is the identity. A `T` that is not finite, of a step that
    is going to be skipped, counts as zero: not every backend takes it apart.
    """
    T = ops.where(ops.all(ops.isfinite(T)), T, ops.zeros_like(T))
    values, vectors_ = ops.linalg.eigh(T)
    top = ops.max(ops.absolute(values))
    values = ops.where(top > 1e-30, ops.absolute(values) + FLOOR * top, 1.0)
    inverse = (vectors_ / ops.expand_dims(values, 0)) @ ops.transpose(vectors_)
    mask = ops.cast(used, T.dtype)
    return inverse * ops.expand_dims(mask, 0) * ops.expand_dims(mask, 1)
