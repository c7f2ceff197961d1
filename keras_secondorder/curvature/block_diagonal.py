"""The block-diagonal approximation: every layer's block beside the others."""

from collections.abc import Callable
from typing import NamedTuple

import keras
from keras import ops

from keras_secondorder import autodiff, vectors
from keras_secondorder.capture import (
    l2_curvature,
    of_wrapper,
    places_of,
    plan_blocks,
)
from keras_secondorder.curvature.diagonal import DiagonalBlock, IdentityBlock
from keras_secondorder.curvature.factor import damped_inverses, running_average
from keras_secondorder.curvature.kronecker import KroneckerBlock
from keras_secondorder.curvature.statistics import batch_factors
from keras_secondorder.curvature.unitwise import UnitwiseBlock


class Inverses(NamedTuple):
    """The inverses of all blocks, a list of tensors each, and the count of failures."""

    values: list
    failed: object


class BlockDiagonal:
    """The curvature of a whole network as a block-diagonal matrix.

    ```
    F = diag(F_1, ..., F_L),   F_l = A_l (x) G_l, or unitwise, or a diagonal
    ```

    Its variables are the running factors of the blocks and their cached inverses.

    Args:
        model: A built Keras model.
        add_variable: The optimizer's `add_variable`.
        on_unsupported: Block of the variables without a Kronecker block.
        max_factor_size: Largest side of a factor that is not diagonal.
        factor_memory: Bytes for all factors and inverses; see `plan_blocks`.
        weight_sharing: "expand" or "reduce"; see `KroneckerBlock`.
        compiled: Whether the step runs inside XLA.
        rank: Rank of the inverses of factors three times as large; None for all whole.
        relative: Whether dampings are in units of each block's mean eigenvalue.

    References:
        Martens (2016), thesis, section 6.4.2.
    """

    #: The class of the blocks with Kronecker factors.
    kronecker = KroneckerBlock
    #: The class of those that are linked to the next one; None for no links.
    chained = None

    def __init__(
        self,
        model,
        add_variable: Callable,
        on_unsupported: str = "diagonal",
        max_factor_size: int = 8192,
        factor_memory: int | None = None,
        weight_sharing: str = "expand",
        compiled: bool = False,
        rank: int | None = None,
        relative: bool = False,
    ):
        self.plan = plan_blocks(
            model,
            on_unsupported,
            max_factor_size,
            factor_memory,
            **self.plan_options(rank),
        )
        self._compiled = compiled
        self.blocks = []
        for plan in self.plan:
            if plan.kind == "kronecker":
                block = self.kronecker if plan.successor is None else self.chained
                self.blocks.append(block(plan, add_variable, weight_sharing))
            elif plan.kind == "unitwise":
                self.blocks.append(UnitwiseBlock(plan, add_variable))
            elif plan.kind == "diagonal":
                self.blocks.append(DiagonalBlock(plan, add_variable))
            else:
                self.blocks.append(IdentityBlock(plan))
        for block in self.blocks:
            block.relative = relative
        #: For each block, the indices of its variables among the trainable ones.
        self.places = places_of(self.plan, model)
        #: Curvature of the L2 penalty on each trainable variable, `eta`.
        self.eta = [l2_curvature(v) for v in model.trainable_variables]
        self.count = add_variable((), "zeros", "float32", name="statistics_count")
        #: How many blocks kept an old inverse because the new one was not finite.
        self.failed = add_variable((), "zeros", "int32", name="failed_inverses")

    @classmethod
    def plan_options(cls, rank: int | None = None) -> dict:
        """What `plan_blocks` has to know of this form.

        Args:
            rank: Rank of the inverses of large factors, for a form that keeps inverses.
        """
        chains, eigenvalues = cls.chained is not None, cls.kronecker.has_eigenvalues
        return {
            "eigenvalues": eigenvalues,
            "chains": chains,
            "rank": None if chains or eigenvalues else rank,
        }

    @property
    def wrappers(self) -> list:
        """The layers that are watched during a step."""
        return [b.wrapper for b in self.blocks if b.wrapper is not None]

    def update(self, due, max_decay: float, objective, linear, **options) -> None:
        """Average the statistics of a batch into the running factors.

        Args:
            due: Boolean scalar: whether to do it in this step.
            max_decay: Largest weight of the past.
            objective: The batch.
            linear: Its linearisation.
            **options: `fisher`, `fraction`, `seed` and `counter` of `batch_factors`.
        """
        old = [vectors.values(b.factors) for b in self.blocks]
        (before,) = vectors.values([self.count])
        count = before + 1.0

        def update():
            batch = batch_factors(objective, linear, self.blocks, **options)
            told = [
                entry
                for statistics in (batch, old)
                for block, own in zip(self.blocks, statistics, strict=True)
                for entry in _telling(block, own)
            ]
            usable = vectors.is_finite(told)
            if linear.aux.weights:
                # A batch of nothing but zero weights says nothing.
                total = sum(ops.sum(w) for w in linear.aux.weights)
                usable = ops.logical_and(usable, total > 0)

            def new():
                # Those of the batch go as the averages come: they are large.
                return [
                    [running_average(o, n.pop(0), count, max_decay) for o in block]
                    for block, n in zip(old, batch, strict=True)
                ], count

            return vectors.choose(usable, new, (old, before))

        factors, count = ops.cond(due, update, lambda: (old, before))
        if factors is old:  # where it is known at once that there is nothing to do
            return
        for block, new in zip(self.blocks, factors, strict=True):
            vectors.assign(block.factors, new)
        vectors.assign([self.count], [count])

    def cached_inverses(self) -> Inverses:
        """The inverses as they are kept."""
        values = [vectors.values(b.inverses) for b in self.blocks]
        return Inverses(values, vectors.values([self.failed])[0])

    def damped_inverses(self, gamma) -> Inverses:
        """Fresh inverses of the damped factors; the last good one where one fails.

        Args:
            gamma: Factored damping, a scalar; each block adds its `eta`.
        """
        cached, failed = self.cached_inverses()
        with autodiff.full_precision():
            everything = self._fresh(gamma)
        values = []
        for old, new in zip(cached, everything, strict=True):
            if not new:
                values.append(old)
                continue
            new = keras.tree.flatten(new)  # a LowRank inverse is three tensors
            usable = vectors.is_finite(new)
            values.append(vectors.choose(usable, lambda new=new: new, old))
            failed = failed + ops.cast(ops.logical_not(usable), failed.dtype)
        return Inverses(values, failed)

    def redamped(self, inverses: Inverses, gamma) -> Inverses:
        """What `damped_inverses` made of the same factors, for another `gamma`."""
        return self.damped_inverses(gamma)

    def _fresh(self, gamma) -> list:
        """New inverses of each block, finite or not."""
        systems = [
            block.systems(vectors.values(block.factors), gamma, self.eta[places[0]])
            if block.wrapper is not None
            else ([], [])
            for block, places in zip(self.blocks, self.places, strict=True)
        ]
        factors = sum((matrices for matrices, _ in systems), [])
        dampings = sum((added for _, added in systems), [])
        inverses = iter(damped_inverses(factors, dampings, self._compiled))
        return [[next(inverses) for _ in matrices] for matrices, _ in systems]

    def keep_inverses(self, inverses: Inverses, cached: Inverses | None = None) -> None:
        """Store inverses for the steps to come, in the place of those before."""
        if inverses is cached:
            return
        for block, new in zip(self.blocks, inverses.values, strict=True):
            vectors.assign(block.inverses, new)
        vectors.assign([self.failed], [inverses.failed])

    def dampings(self, damping) -> list:
        """`lambda` of each trainable variable, without its `eta`."""
        dampings = [None] * len(self.eta)
        for block, places in zip(self.blocks, self.places, strict=True):
            own = block.damping(damping)
            for i in places:
                dampings[i] = own
        return dampings

    def ridge(self, damping) -> list:
        """`lambda + eta` of each trainable variable."""
        dampings = self.dampings(damping)
        return [own + eta for own, eta in zip(dampings, self.eta, strict=True)]

    def rows_pay(self, rows) -> bool:
        """Whether some block is preconditioned from rows at this batch size."""
        return any(b.wrapper is not None and b.rows_pay(rows) for b in self.blocks)

    def precondition(self, gradient, inverses, damping, inputs, taps) -> list:
        """The approximate inverse curvature times the gradient.

        Args:
            gradient: One tensor for each trainable variable.
            inverses: What `damped_inverses` or `cached_inverses` returned.
            damping: `gamma^2`, for blocks damped when applied; they add their `eta`.
            inputs: Inputs of the watched layers, lists by index.
            taps: Gradients at their pre-activations, by the names of `recording`,
                where they are known.

        Returns:
            `U`, one float32 tensor for each trainable variable.
        """
        U, index = [None] * len(gradient), 0
        for block, places, inverse in zip(
            self.blocks, self.places, inverses.values, strict=True
        ):
            rows = None
            if block.wrapper is not None:
                rows = block.rows(inputs.get(index, []), of_wrapper(taps, index))
                index += 1
            V = [gradient[i] for i in places]
            own = None
            if not block.inverts_moments:
                own = block.damping(damping) + self.eta[places[0]]
            parts = block.precondition(V, inverse, own, rows)
            for i, part in zip(places, parts, strict=True):
                U[i] = part
        return U

    def multiply(self, v: list) -> list:
        """The approximate curvature, without damping, times a vector.

        Args:
            v: One tensor for each trainable variable.

        Returns:
            `F v`, one float32 tensor for each trainable variable.
        """
        product = [None] * len(v)
        for block, places in zip(self.blocks, self.places, strict=True):
            for i, part in zip(
                places, block.multiply([v[i] for i in places]), strict=True
            ):
                product[i] = part
        return product


def _telling(block, statistics: list) -> list:
    """Entries that are finite only if all are: of a second moment, its diagonal."""
    moments = {id(v) for v in block.moments}
    return [
        ops.diagonal(new, axis1=-2, axis2=-1) if id(v) in moments else new
        for v, new in zip(block.factors, statistics, strict=True)
    ]
