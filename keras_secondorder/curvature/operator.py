"""A symmetric matrix that is known by its products."""

import math
import warnings

import numpy as np
from keras import ops

from keras_secondorder import autodiff
from keras_secondorder.arguments import check_count
from keras_secondorder.curvature import spectrum
from keras_secondorder.curvature.columns import columns_of
from keras_secondorder.solvers import (
    Status,
    conjugate_gradient,
    describe,
    minres_qlp,
)

SOLVERS = {"cg": conjugate_gradient, "minres_qlp": minres_qlp}
SOLVED = (Status.RESIDUAL, Status.LEAST_SQUARES, Status.PROGRESS)
# A dense matrix of more rows than this is refused: 20,000 rows are 1.6 GB in float32.
MAX_DENSE_ROWS = 20_000
# Up to here a diagonal is computed exactly where nothing else is asked for.
MAX_EXACT_PRODUCTS = 512


class LinearOperator:
    """A symmetric matrix `A` of shape `(P, P)`, known by `A v`.

    A vector is flat, of shape `(P,)`, or nested: a list of tensors shaped like the
    trainable variables of the model. Several vectors are the columns of a flat
    `(P, k)`, or the last axis of each nested tensor. What comes back has the form of
    what was given. A subclass implements `products`; all the rest follows.

    ```
    A @ v,   A + B,   2.0 * A,   A.damped(lam) = A + lam I
    ```

    Args:
        shapes: Shapes of the tensors that a nested vector consists of.
        dtype: "float32" or "float64".

    Example:
        >>> import numpy as np
        >>> from keras_secondorder.curvature import DenseOperator
        >>> A = DenseOperator(np.diag([1.0, 2.0, 4.0]))
        >>> (A.damped(1.0) @ np.ones(3)).tolist()
        [2.0, 3.0, 5.0]
        >>> float((2.0 * A + A).trace(samples=None))
        21.0
    """

    def __init__(self, shapes: list, dtype: str):
        self.shapes = [tuple(shape) for shape in shapes]
        self.dtype = dtype
        size = sum(math.prod(shape) for shape in self.shapes)
        #: `(P, P)`.
        self.shape = (size, size)

    def products(self, columns: list) -> list:
        """`A v` for several flat vectors.

        Args:
            columns: Tensors of shape `(P,)`.

        Returns:
            Tensors of shape `(P,)`.
        """
        raise NotImplementedError

    def matvec(self, v):
        """`A v` for one flat vector."""
        return self.products([v])[0]

    # --- arithmetic ----------------------------------------------------------------

    def __matmul__(self, v):
        columns, rebuild = columns_of(v, self.shapes, self.dtype)
        return rebuild(self.products(columns))

    def __add__(self, other: "LinearOperator") -> "LinearOperator":
        return Sum([(1.0, self), (1.0, other)])

    def __sub__(self, other: "LinearOperator") -> "LinearOperator":
        return Sum([(1.0, self), (-1.0, other)])

    def __mul__(self, factor: float) -> "LinearOperator":
        if isinstance(factor, LinearOperator):
            raise TypeError(
                "An operator is multiplied by a number. Received another operator. "
                "Multiply a vector by one after the other: `A @ (B @ v)`."
            )
        return Sum([(factor, self)])

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> "LinearOperator":
        return self * (1.0 / divisor)

    def __neg__(self) -> "LinearOperator":
        return self * -1.0

    def damped(self, lam: float) -> "LinearOperator":
        """`A + lam I`.

        Raises:
            ValueError: `lam` is not finite.
        """
        if not math.isfinite(lam):
            raise ValueError(f"Damping must be finite. Received lam={lam}.")
        return Sum([(1.0, self)], lam)

    # --- the whole matrix ----------------------------------------------------------

    def to_dense(self):
        """The matrix, shape `(P, P)`, from `P` products.

        Raises:
            ValueError: It has more than 20,000 rows.
        """
        size = self.shape[0]
        if size > MAX_DENSE_ROWS:
            raise ValueError(
                f"The dense matrix would have {size} rows and take "
                f"{size**2 * 4 / 1e9:.0f} GB. `to_dense` goes up to {MAX_DENSE_ROWS} "
                "rows. Use products, `eigenvalues` or `diagonal` instead."
            )
        return ops.stack(self.products([self._unit(i) for i in range(size)]), axis=1)

    def diagonal(
        self, samples: int | None = None, seed: int = 0, exact: bool | None = None
    ):
        """The diagonal, exact or estimated.

        ```
        exact:      e_i . A e_i
        estimated:  mean over samples of  v * (A v),   v of independent +-1
        ```

        Args:
            samples: Number of random vectors, 64 by default. The error of an entry
                falls as `1 / sqrt(samples)`, and is large where the rest of its row is.
            seed: Seed of the vectors.
            exact: Whether to take `P` products instead; None for up to 512 rows where
                `samples` is not given.

        Returns:
            Tensor of shape `(P,)`.

        References:
            Bekas, Kokiopoulou & Saad (2007), section 2.
        """
        size = self.shape[0]
        check_samples(samples, exact)
        if exact is None:
            exact = samples is None and size <= MAX_EXACT_PRODUCTS
        if exact:
            units = (self._unit(i) for i in range(size))
            return ops.stack([self.matvec(e)[i] for i, e in enumerate(units)])
        probes = self._signs(samples or 64, seed)
        products = self.products(probes)
        terms = [v * Av for v, Av in zip(probes, products, strict=True)]
        return sum(terms[1:], terms[0]) / len(terms)

    def trace(self, samples: int | None = 64, method: str = "hutch++", seed: int = 0):
        """The trace, from products with random vectors.

        Args:
            samples: Number of products, or None for the exact trace from `P` products.
            method: "hutchinson", or "hutch++", whose error falls as `1 / samples`
                instead of its square root.
            seed: Seed of the vectors.

        Returns:
            A scalar.

        References:
            Hutchinson (1990); Meyer, Musco, Musco & Woodruff (2021), algorithm 1.
        """
        check_samples(samples)
        if samples is None or samples >= self.shape[0]:
            units = (self._unit(i) for i in range(self.shape[0]))
            return sum(self.matvec(e)[i] for i, e in enumerate(units))
        if method not in ("hutchinson", "hutch++"):
            raise ValueError(
                "`method` must be 'hutchinson' or 'hutch++'. "
                f"Received method={method!r}."
            )
        if method == "hutchinson":
            return spectrum.hutchinson(self.products, self._signs(samples, seed))
        third = max(1, samples // 3)
        probes = self._signs(2 * third, seed)
        return spectrum.hutch_plus_plus(self.products, probes[:third], probes[third:])

    def eigenvalues(self, k: int = 6, **options):
        """The `k` eigenvalues that are largest in magnitude, the largest first.

        Args:
            k: How many.
            **options: Those of `eigenpairs`.

        Returns:
            Tensor of shape `(k,)`.
        """
        return self.eigenpairs(k, **options).values

    def eigenpairs(
        self,
        k: int = 6,
        rtol: float = 1e-3,
        max_products: int = 400,
        seed: int = 0,
    ) -> spectrum.Eigenpairs:
        """The `k` eigenpairs that are largest in magnitude, by Lanczos.

        Args:
            k: How many.
            rtol: Residual to reach, relative to the largest eigenvalue.
            max_products: Most products to spend; a warning says when they ran out.
            seed: Seed of the starting vector.

        Returns:
            `Eigenpairs` with values `(k,)`, vectors `(k, P)` and residual norms `(k,)`.
        """
        random = np.random.default_rng(seed)
        with autodiff.stepwise():
            return spectrum.lanczos_eigenpairs(
                self.matvec, lambda: self._normal(1, random)[0], k, rtol, max_products
            )

    def spectral_density(
        self,
        samples: int = 4,
        steps: int = 64,
        points: int = 512,
        width: float | None = None,
        seed: int = 0,
    ) -> spectrum.Density:
        """The density of the eigenvalues, by stochastic Lanczos quadrature.

        Args:
            samples: Number of random starting vectors.
            steps: Lanczos steps from each.
            points: Number of grid points.
            width: Standard deviation of the Gaussian that stands for an eigenvalue;
                None for a hundredth of the range of the spectrum.
            seed: Seed of the vectors.

        Returns:
            A `Density`: NumPy arrays `grid` and `density`, which integrates to 1.

        References:
            Ghorbani, Krishnan & Xiao (2019), section 2; Golub & Welsch (1969).
        """
        counts = {"samples": samples, "steps": steps, "points": points}
        for name, value in counts.items():
            check_count(name, value)
        with autodiff.stepwise():
            return spectrum.lanczos_density(
                self.matvec, self._normal(samples, seed), steps, points, width
            )

    def solve(self, b, damping: float = 0.0, method: str = "cg", **options):
        """Solve `(A + damping I) x = b`.

        Args:
            b: A vector, flat or nested.
            damping: What is added to the diagonal.
            method: "cg", for positive definite matrices, or "minres_qlp", which also
                takes indefinite and singular ones.
            **options: Those of `solvers.conjugate_gradient` or `solvers.minres_qlp`.

        Returns:
            A `solvers.Solution` whose `x` has the form of `b`. A warning says so where
            the solver stopped short of its tolerance.
        """
        if method not in SOLVERS:
            raise ValueError(
                f"`method` must be one of {sorted(SOLVERS)}. "
                f"Received method={method!r}."
            )
        columns, rebuild = columns_of(b, self.shapes, self.dtype)
        if len(columns) != 1 or (not isinstance(b, list | tuple) and _rank(b) != 1):
            raise ValueError(
                f"`solve` takes one vector. Received {len(columns)} columns. "
                "Call it for each of them."
            )
        if method == "cg":
            options = {"epsilon": None, "rtol": 1e-5, **options}
        with autodiff.stepwise():
            solution = SOLVERS[method](
                self.damped(damping).matvec, columns[0], **options
            )
        if int(solution.status) not in SOLVED:
            relative = float(solution.residual_norm) / float(_norm(columns[0]))
            advice = "A singular matrix needs `damping`, or method='minres_qlp'."
            if int(solution.status) == Status.NON_FINITE:
                advice = "Damping does not help: look for NaN in `b` and the products."
            warnings.warn(
                f"The system is not solved to its tolerance after "
                f"{int(solution.iterations)} iterations, with a residual "
                f"{relative:.3g} times that of x = 0. {describe(solution.status)} "
                f"{advice}",
                stacklevel=2,
            )
        return solution._replace(x=rebuild([solution.x]))

    def as_scipy(self):
        """The operator as a `scipy.sparse.linalg.LinearOperator` on NumPy arrays."""
        from scipy.sparse.linalg import LinearOperator as ScipyOperator

        def multiply(v):
            return ops.convert_to_numpy(self @ v)

        return ScipyOperator(
            self.shape,
            matvec=lambda v: multiply(np.reshape(v, -1)),
            rmatvec=lambda v: multiply(np.reshape(v, -1)),
            matmat=multiply,
            dtype=np.dtype(self.dtype),
        )

    # --- vectors -------------------------------------------------------------------

    def _tensor(self, value):
        return ops.cast(ops.convert_to_tensor(value), self.dtype)

    def _unit(self, i: int):
        return ops.one_hot(i, self.shape[0], dtype=self.dtype)

    def _signs(self, count: int, seed: int) -> list:
        draw = np.random.default_rng(seed).integers(0, 2, (count, self.shape[0]))
        return [self._tensor(row) for row in 2.0 * draw - 1.0]

    def _normal(self, count: int, seed) -> list:
        draw = np.random.default_rng(seed).normal(size=(count, self.shape[0]))
        return [self._tensor(row) for row in draw]

    def __repr__(self):
        return f"<{type(self).__name__} {self.shape[0]} x {self.shape[1]} {self.dtype}>"


class Sum(LinearOperator):
    """`sum_i c_i A_i + shift I`.

    Args:
        terms: Pairs `(c_i, A_i)`; all of one shape.
        shift: A number.

    Raises:
        ValueError: The shapes differ.
        TypeError: An `A_i` is no operator.
    """

    def __init__(self, terms: list, shift: float = 0.0):
        first = terms[0][1]
        super().__init__(first.shapes, first.dtype)
        self._terms, self._shift = terms, shift
        for _, term in terms:
            if not isinstance(term, LinearOperator):
                raise TypeError(
                    f"An operator is added to an operator. Received {term!r}. "
                    "`A.damped(lam)` adds a multiple of the identity."
                )
            if term.shape != first.shape:
                raise ValueError(
                    f"Operators can be added where their shapes agree. Received "
                    f"{first.shape} and {term.shape}. Build both for the same model."
                )

    def products(self, columns):
        """The weighted sum of the terms' products."""
        totals = [self._shift * v for v in columns]
        for factor, term in self._terms:
            own = [ops.cast(v, term.dtype) for v in columns]
            totals = [
                t + factor * ops.cast(Av, self.dtype)
                for t, Av in zip(totals, term.products(own), strict=True)
            ]
        return totals


def check_samples(samples: int | None, exact: bool | None = None) -> None:
    """Refuse a number of random vectors below 1, or one for an exact diagonal."""
    if samples is not None:
        check_count("samples", samples)
    if exact and samples is not None:
        raise ValueError(
            "An exact diagonal takes no random vectors. Received exact=True with "
            f"samples={samples}. Give one of them."
        )


def _norm(v):
    return ops.sqrt(ops.sum(v * v))


def _rank(v) -> int:
    return len(ops.convert_to_tensor(v).shape)
