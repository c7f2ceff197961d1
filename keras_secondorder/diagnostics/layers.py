"""The factors of each layer's curvature block, summed up."""

from typing import NamedTuple

import numpy as np
from keras import ops

from keras_secondorder import vectors
from keras_secondorder.curvature import BlockDiagonal, LowRank
from keras_secondorder.diagnostics.measures import effective_rank

# Eigenvalues below this share of the largest are rounding errors of float32.
RELATIVE_FLOOR = 1e-7


class Factor(NamedTuple):
    """One factor of a block.

    Attributes:
        name: "A", "G", "F" or "D"; with a number where a layer has several.
        eigenvalues: NumPy array, ascending.
        damping: What is added to each of them, an array like it; None where the damping
            is added to the product of A and G instead.
        matrix: The factor as it is stored.
        inverse: The inverse that the optimizer uses, or None where it keeps others.
    """

    name: str
    eigenvalues: np.ndarray
    damping: np.ndarray | None
    matrix: np.ndarray
    inverse: np.ndarray | None

    @property
    def trace(self) -> float:
        """The sum of the eigenvalues."""
        return float(self.eigenvalues.sum())

    @property
    def condition(self) -> float | None:
        """Largest over smallest eigenvalue of the damped factor, None without one."""
        if self.damping is None:
            return None
        damped = np.maximum(self.eigenvalues, 0.0) + self.damping
        floor = max(RELATIVE_FLOOR * damped.max(), 1e-30)
        return float(max(damped.max(), 1e-30) / max(damped.min(), floor))

    @property
    def effective_rank(self) -> float:
        """How many eigenvalues carry the trace; see `measures.effective_rank`."""
        return effective_rank(self.eigenvalues)

    @property
    def damping_share(self) -> float | None:
        """The damping's share of the trace of the damped factor, between 0 and 1."""
        if self.damping is None:
            return None
        added = self.damping.sum()
        total = self.trace + added
        return float(added / total) if total > 0 else 0.0

    def scalars(self) -> dict:
        """All of these that there are, by name, and the extreme eigenvalues."""
        found = {
            "condition": self.condition,
            "trace": self.trace,
            "effective_rank": self.effective_rank,
            "largest": float(self.eigenvalues.max()),
            "smallest": float(self.eigenvalues.min()),
            "damping_share": self.damping_share,
        }
        return {name: value for name, value in found.items() if value is not None}


class Layer(NamedTuple):
    """One block.

    Attributes:
        name: Name of the layer, with the variable's where that is not all of it.
        kind: "kronecker", "unitwise" or "diagonal".
        factors: Its `Factor` objects.
        pi: `sqrt` of the damping of A over that of G, for one pair of full factors.
    """

    name: str
    kind: str
    factors: list
    pi: float | None


def has_blocks(optimizer) -> bool:
    """Whether an optimizer keeps curvature blocks to look at."""
    curvature = getattr(optimizer, "curvature", None)
    return optimizer.built and isinstance(curvature, BlockDiagonal)


def layers(optimizer, index: int | None = None, inverses: bool = True) -> list[Layer]:
    """The blocks of a K-FAC optimizer, with the spectra of their factors.

    Eigenvalues are computed in float64 on the host, at a cost of the cube of a factor's
    side.

    Args:
        optimizer: A built `KFAC`; on JAX, with its variables in sync.
        index: Number of one block to look at, or None for all.
        inverses: Whether to look at the inverses as well.

    Returns:
        A `Layer` for each block that has a factor.
    """
    (gamma,) = vectors.values([optimizer.gamma])
    curvature, found = optimizer.curvature, []
    for number, (plan, block, places) in enumerate(
        zip(curvature.plan, curvature.blocks, curvature.places, strict=True)
    ):
        if not block.factors or index not in (None, number):
            continue
        name, eta = plan.layer_name, curvature.eta[places[0]]
        if block.wrapper is None:
            D = _array(block.factors[0]).ravel()
            damping = np.full(D.shape, float(block.damping(gamma**2)) + eta)
            factor = Factor("D", np.sort(D), damping, D, None)
            name = f"{name}/{plan.variables[0].name}"
            found.append(Layer(name, plan.kind, [factor], None))
            continue
        values = vectors.values(block.moments)
        # Exact damping is added to the product of the factors.
        dampings = [None] * len(values)
        if optimizer.tikhonov == "factored" or plan.kind != "kronecker":
            dampings = [_array(d) for d in block.dampings_of(values, gamma, eta)]
        kept = [None] * len(values)
        if inverses and block.inverts_moments:
            kept = block.by_factor(vectors.values(block.inverses))
        sides = [pair[i] for i in range(len(block.sides[0])) for pair in block.sides]
        factors = [
            _factor(label, _array(matrix), damping, side, inverse)
            for label, matrix, damping, side, inverse in zip(
                _labels(plan), values, dampings, sides, kept, strict=True
            )
        ]
        pi = None
        A, G = dampings if len(dampings) == 2 else (None, None)
        if plan.kind == "kronecker" and A is not None and A.size == 1:
            pi = float(np.sqrt(A / G)) if A > 0 and G > 0 else None
        found.append(Layer(name, plan.kind, factors, pi))
    return found


def gains(optimizer, gradient: list) -> dict:
    """`|U| / |V|` of every block: how far preconditioning stretches its gradient.

    Args:
        optimizer: A built `KFAC`; on JAX, with its variables in sync.
        gradient: `V`, one tensor for each trainable variable.

    Returns:
        Numbers by the names of the layers; without those whose gradient is zero.
    """
    curvature = optimizer.curvature
    (gamma,) = vectors.values([optimizer.gamma])
    U = curvature.precondition(gradient, curvature.cached_inverses(), gamma**2, {}, {})
    squares = {}
    for plan, places in zip(curvature.plan, curvature.places, strict=True):
        raw = sum(float(ops.sum(gradient[i] ** 2)) for i in places)
        stretched = sum(float(ops.sum(U[i] ** 2)) for i in places)
        before = squares.get(plan.layer_name, (0.0, 0.0))
        squares[plan.layer_name] = (before[0] + raw, before[1] + stretched)
    return {
        name: float(np.sqrt(stretched / raw))
        for name, (raw, stretched) in squares.items()
        if raw > 0
    }


def factor_eigenvalues(matrix, side) -> np.ndarray:
    """Eigenvalues of a factor, whatever its form: full, split, diagonal or a stack.

    Args:
        matrix: NumPy array of shape `side.shape`.
        side: Its form.

    Returns:
        Array `(stack * size,)`, in the order of the stack.
    """
    w = side.width
    if w == 1:
        return np.asarray(matrix, float).reshape(-1)
    found = []
    for i, block in enumerate(np.asarray(matrix, float).reshape(-1, w, w)):
        last = i % side.blocks == side.blocks - 1
        rows = side.size - (side.blocks - 1) * w if last else w  # the rest is padding
        found.append(np.linalg.eigvalsh(block[:rows, :rows]))
    return np.concatenate(found)


def _factor(name, matrix, damping, side, inverse) -> Factor:
    e = factor_eigenvalues(matrix, side)
    order = np.argsort(e, kind="stable")
    if damping is not None:
        damping = np.repeat(damping.reshape(-1), e.size // damping.size)[order]
    if isinstance(inverse, LowRank):
        inverse = inverse.to_dense()
    inverse = None if inverse is None else _array(inverse)
    return Factor(name, e[order], damping, matrix, inverse)


def _labels(plan) -> list:
    if plan.kind == "unitwise":
        return ["F"]
    count = len(plan.sides)
    ends = [""] if count == 1 else [f"_{i}" for i in range(count)]
    return [f"{factor}{end}" for factor in "AG" for end in ends]


def _array(value) -> np.ndarray:
    return np.array(ops.convert_to_numpy(value)).astype(float)
