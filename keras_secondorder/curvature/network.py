"""The curvature matrices of a compiled model, to be multiplied by and looked at."""

import math

import numpy as np
from keras import ops

from keras_secondorder import autodiff, vectors
from keras_secondorder.capture import l2_curvature
from keras_secondorder.curvature.batches import Batches, rows_of
from keras_secondorder.curvature.compiled_model import (
    build_loss,
    check_loss,
    check_model,
)
from keras_secondorder.curvature.operator import (
    MAX_EXACT_PRODUCTS,
    LinearOperator,
    check_samples,
)
from keras_secondorder.curvature.products import (
    empirical_fisher_products,
    fisher_products,
    gauss_newton_products,
    hessian_products,
    sampled_fisher_products,
)
from keras_secondorder.likelihoods import loss_weights_of
from keras_secondorder.objective import Objective, state_variables


def hessian(model, x, y=None, sample_weight=None, training: bool = False):
    """The Hessian of the objective that `fit` minimises, penalties included.

    Args:
        model: A compiled and built Keras model.
        x: Inputs, or an iterable of batches `(x, y)` or `(x, y, sample_weight)`: a
            `tf.data.Dataset`, a `keras.utils.PyDataset`, a torch `DataLoader`, a list.
            Of several batches, the average is taken, weighted by their rows, and the
            memory is that of one.
        y: Targets, where `x` is an array.
        sample_weight: Weights of the examples, or None; where `x` holds batches, they
            come with them.
        training: Whether layers are in training mode: then dropout masks are drawn
            once, for the life of the operator. Batch normalisation statistics never
            move.

    Returns:
        A `LinearOperator` at the present weights; training on does not change it.

    Raises:
        ValueError: The model is not compiled or not built, or has nothing to train;
            there are no labels, or no batches.

    Example:
        >>> import keras, numpy as np, keras_secondorder as kso
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile(loss="mse")
        >>> H = kso.curvature.hessian(model, np.eye(2), np.ones((2, 1)))
        >>> print(np.round(H.to_dense(), 6).tolist())
        [[1.0, 0.0, 1.0], [0.0, 1.0, 1.0], [1.0, 1.0, 2.0]]

    References:
        Pearlmutter (1994); Martens (2016), thesis, section 2.2.
    """
    data = Batches(model, x, y, sample_weight)
    return NetworkOperator(
        model, data, lambda h, number: hessian_products(h), training, builds_loss=True
    )


def gauss_newton(model, x, y=None, sample_weight=None, training: bool = False):
    """The generalised Gauss-Newton matrix, `J^T H_z J + diag(eta)`.

    `H_z` is the Hessian of the loss with respect to the outputs of the network, `eta`
    the curvature of the L2 penalties. It is positive semi-definite.

    Args:
        model: See `hessian`.
        x: See `hessian`.
        y: See `hessian`.
        sample_weight: See `hessian`.
        training: See `hessian`.

    Returns:
        A `LinearOperator`.

    Raises:
        ValueError: As `hessian`. Of a loss that is not convex in the outputs, `H_z` is
            projected on the positive semi-definite matrices, with a warning.

    References:
        Schraudolph (2002); Martens (2016), thesis, section 4.3.
    """
    data = Batches(model, x, y, sample_weight)
    return NetworkOperator(
        model,
        data,
        lambda h, number: gauss_newton_products(h),
        training,
        penalized=True,
    )


def fisher(
    model,
    x,
    y=None,
    sample_weight=None,
    samples: int | None = None,
    seed: int = 0,
    training: bool = False,
):
    """The Fisher matrix of the model's predictive distribution, without labels.

    Args:
        model: See `hessian`.
        x: Inputs, or an iterable of batches of inputs or of `(x, y, ...)`.
        y: Not used: a Fisher matrix does not depend on the labels.
        sample_weight: Weights of the examples, or None.
        samples: None for the exact expectation over targets, or the number of targets
            drawn for each example.
        seed: Seed of the draws, which are fixed for the life of the operator.
        training: See `hessian`.

    Returns:
        A `LinearOperator`.

    Raises:
        ValueError: As `hessian`; also where a loss is no negative log-likelihood.

    References:
        Martens (2016), thesis, sections 5.1, 5.5 and 6.5.
    """
    check_samples(samples)

    def build(objective, number):
        if samples is None:
            return fisher_products(objective)
        return sampled_fisher_products(objective, samples, seed, number)

    data = Batches(model, x, None, sample_weight, labelled=False)
    return NetworkOperator(model, data, build, training)


def empirical_fisher(
    model,
    x,
    y=None,
    sample_weight=None,
    centered: bool = False,
    training: bool = False,
):
    """The second moment of the gradients of single examples, with their labels.

    The gradients are those of `-log p`: for a squared loss over `D` outputs, the loss
    is `2 / D` times that, and so is this matrix. A loss without a distribution counts
    as `-log p` itself.

    Args:
        model: See `hessian`.
        x: See `hessian`.
        y: See `hessian`.
        sample_weight: See `hessian`.
        centered: Whether the mean gradient is taken out: the covariance matrix. Of
            several batches, each has its own mean.
        training: See `hessian`.

    Returns:
        A `LinearOperator`.

    Raises:
        ValueError: As `hessian`.

    References:
        Le Roux, Manzagol & Bengio (2008); Martens (2016), thesis, section 5.6, also
        for why this is not the Fisher matrix.
    """

    def build(objective, number):
        return empirical_fisher_products(objective, centered)

    data = Batches(model, x, y, sample_weight)
    return NetworkOperator(model, data, build, training)


class NetworkOperator(LinearOperator):
    """A curvature matrix of a model on one batch or on several.

    The model is linearised once for each batch, and products at that point share the
    work. Of one batch the linearisation is kept; of several, one at a time.

    Args:
        model: A compiled and built Keras model.
        data: The batches.
        build: `(Objective, number of the batch) -> Products`.
        training: Whether layers are in training mode.
        builds_loss: Whether the products use Keras's own `compute_loss`.
        penalized: Whether the products include the curvature of L2 penalties.
    """

    def __init__(
        self, model, data, build, training, builds_loss=False, penalized=False
    ):
        check_model(model)
        if not builds_loss:
            check_loss(model)
        variables = list(model.trainable_variables)
        super().__init__(
            [v.shape for v in variables],
            vectors.precision_of(vectors.values(variables)),
        )
        if builds_loss:
            build_loss(model, data)
        self._data = data
        eta = [l2_curvature(v) if penalized else 0.0 for v in variables]
        full = [ops.full(s, e) for s, e in zip(self.shapes, eta, strict=True)]
        self._penalties = vectors.flatten(full, self.dtype) if any(eta) else 0.0
        loss_weights, shapes, dtype = loss_weights_of(model), self.shapes, self.dtype
        loss = model.loss

        # These close over no `self`: a cycle would keep the linearisation in memory
        # until the garbage collector comes by.
        def prepare(parameters, state, batch, number):
            objective = Objective(
                model,
                *batch,
                loss_weights=loss_weights,
                training=training,
                values=(parameters, state),
                precision=dtype,
            )
            made = build(objective, number)
            like = [ops.zeros(shape, dtype) for shape in shapes]
            seeds = [ops.zeros(shape, dtype) for shape in made.root_shapes]
            root = made.root and autodiff.portable(made.root, seeds)
            return autodiff.portable(made.product, like), root, seeds

        def check_unchanged():
            same = [id(v) for v in model.trainable_variables] == places
            if not same or model.loss is not loss:
                raise ValueError(
                    "An operator on several batches goes back to its model for each "
                    "of them. The model has been compiled with another loss, or layers "
                    "frozen or unfrozen, since it was made. Make the operator again."
                )

        def present():
            # Copies: the operator stays where it is while the model is trained.
            groups = variables, state_variables(model)
            return [[ops.copy(p) for p in vectors.values(group)] for group in groups]

        def multiply(product, flat):
            v = vectors.unflatten(flat, shapes)
            return vectors.flatten(product(v), dtype)

        def apply_root(root, u):
            return vectors.flatten(root(u), dtype)

        places = [id(v) for v in variables]
        self._check_unchanged = check_unchanged
        self._present = present
        self._prepare = autodiff.compiled(prepare)
        self._multiply = autodiff.compiled(multiply)
        self._apply_root = autodiff.compiled(apply_root)
        self.refresh()

    def refresh(self) -> "NetworkOperator":
        """Move to the present weights of the model; nothing is compiled again.

        Returns:
            The operator itself.

        Raises:
            ValueError: The model has other trainable variables or another loss now.
        """
        self._check_unchanged()
        self._kept = None
        self._point, self._state = self._present()
        self._random = autodiff.random_state()
        # At once: what cannot be done is said here, and a single batch is done with.
        next(self._prepared())
        return self

    def products(self, columns):
        """One pass over the data, for all columns."""
        totals, rows = [0.0] * len(columns), 0
        for (product, _, _), count in self._prepared():
            rows += count
            for i, v in enumerate(columns):
                totals[i] = totals[i] + count * self._multiply(product, v)
        return [t / rows for t in totals]

    def diagonal(
        self, samples: int | None = None, seed: int = 0, exact: bool | None = None
    ):
        """The diagonal, exact or estimated.

        ```
        exact:      sum over entries k of the outputs of  (R e_k)^2
        estimated:  mean over samples of  (R u)^2,   u of independent +-1
        ```

        for a matrix `C = R R^T` (Gauss-Newton, Fisher), which has less noise than what
        serves any matrix. Penalties are added exactly.

        Args:
            samples: Number of random vectors, 64 by default.
            seed: Seed of the vectors.
            exact: Whether to take all unit vectors instead; None where 512 do and
                `samples` is not given.

        Returns:
            Tensor of shape `(P,)`.

        References:
            Chapelle & Erhan (2011); Martens, Sutskever & Swersky (2012); Martens
            (2016), thesis, section 4.9.4.
        """
        check_samples(samples, exact)
        few_rows = samples is None and self.shape[0] <= MAX_EXACT_PRODUCTS
        if exact is None and few_rows:
            return super().diagonal(exact=True)
        random, total, rows = np.random.default_rng(seed), 0.0, 0
        for (_, root, like), count in self._prepared():
            if root is None:
                return super().diagonal(samples, seed, exact)
            shapes = [tuple(t.shape) for t in like]
            entries = sum(math.prod(shape) for shape in shapes)
            few = samples is None and entries <= MAX_EXACT_PRODUCTS
            if exact or (exact is None and few):
                draws, share = _units(shapes), 1.0
            else:
                number = samples or 64
                draws, share = _signs(random, shapes, number), 1.0 / number
            for u in draws:
                u = [self._tensor(part) for part in u]
                total = total + share * count * self._apply_root(root, u) ** 2
            rows += count
        return total / rows + self._penalties

    def trace(self, samples: int | None = 64, method: str = "hutch++", seed: int = 0):
        """As of any operator; the exact one is the sum of the exact diagonal."""
        if samples is None:
            return ops.sum(self.diagonal(exact=True))
        return super().trace(samples, method, seed)

    def _prepared(self):
        if self._kept is not None:
            yield self._kept
            return
        self._check_unchanged()
        for number, batch in enumerate(self._data):
            number = ops.convert_to_tensor(number, "int32")
            outside = autodiff.random_state()
            autodiff.set_random_state(self._random)
            try:
                prepared = self._prepare(self._point, self._state, batch, number)
            finally:
                autodiff.set_random_state(outside)
            item = prepared, rows_of(batch)
            if self._data.single:
                self._kept = item
            yield item


def _units(shapes):
    """One-hot entries, one after the other."""
    for i, shape in enumerate(shapes):
        for k in range(math.prod(shape)):
            u = [np.zeros(s) for s in shapes]
            u[i].flat[k] = 1.0
            yield u


def _signs(random, shapes, number):
    for _ in range(number):
        yield [2.0 * random.integers(0, 2, s) - 1.0 for s in shapes]
