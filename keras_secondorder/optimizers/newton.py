"""Newton's method with the dense Hessian."""

import keras
from keras import ops

from keras_secondorder.arguments import check_one_of
from keras_secondorder.curvature.products import hessian_products
from keras_secondorder.optimizers.dense_newton import DenseNewton, Quadratic

#: What becomes of the eigenvalues before they are damped.
NEGATIVE = {
    "absolute": ops.absolute,
    "shift": lambda e: e - ops.where(ops.min(e) < 0, ops.min(e), 0.0),
    "keep": lambda e: e,
}


@keras.saving.register_keras_serializable(package="keras_secondorder")
class Newton(DenseNewton):
    """Newton's method for small models, with exact damping.

    ```
    H = Q diag(e) Q^T                                    # P products, P^3 operations
    delta = -Q (|e| + lambda)^-1 Q^T g
    rho   = (h(theta + delta) - h(theta)) / (g^T delta + 1/2 delta^T H delta)
    lambda from rho, and again, until h falls;   theta += learning_rate delta
    ```

    It is for a few hundred parameters and the full batch, `fit(batch_size=len(x))`.
    `Newton(damping=0.0, negative_curvature="keep")` is the method of the textbooks,
    which goes to any stationary point, saddles included.

    Args:
        learning_rate: A number or a Keras schedule; 1 takes the step as found.
        damping: `lambda`: an `AdaptiveDamping`, which moves at each trial; a number or
            a schedule, with which each step is taken as it is. "auto" is
            `AdaptiveDamping(None, every=1, decay=1/2, minimum=1e-12)`.
        negative_curvature: What becomes of the eigenvalues: "absolute", their absolute
            values; "shift", the most negative is subtracted from all; or "keep".
        trials: Most `lambda` that are tried in a step; the weights stay where none
            makes the loss fall.
        **kwargs: Keras's shared arguments.

    Raises:
        ValueError: Arguments out of range; in `fit`, more than 5,000 parameters.

    Example:
        >>> import keras, keras_secondorder as kso
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile(optimizer=kso.Newton(damping=0.0), loss="mse")
        >>> x = keras.random.normal((64, 4), seed=0)
        >>> history = model.fit(x, x[:, :1], batch_size=64, epochs=2, verbose=0)
        >>> history.history["loss"][-1] < 1e-10
        True

    References:
        Nocedal & Wright (2006), sections 3.3, 3.4 and 10.3 (accepting and rejecting).
        "absolute": Dauphin et al. (2014), algorithm 1, with all of the spectrum.
    """

    def __init__(
        self,
        learning_rate=1.0,
        damping="auto",
        negative_curvature: str = "absolute",
        trials: int = 10,
        **kwargs,
    ):
        check_one_of("negative_curvature", negative_curvature, tuple(NEGATIVE))
        super().__init__(learning_rate, damping, trials, **kwargs)
        self.negative_curvature = negative_curvature

    def convex(self, e):
        """The eigenvalues as they are damped and inverted."""
        return NEGATIVE[self.negative_curvature](e)

    def quadratic(self, objective):
        """The Hessian, taken apart."""
        e, Q = self.eigh(self.dense(hessian_products(objective).product))
        return Quadratic(e, Q, ops.ones_like(e))
