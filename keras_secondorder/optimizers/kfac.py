"""K-FAC: natural gradient with Kronecker-factored curvature."""

from typing import NamedTuple

import keras
from keras import ops

from keras_secondorder import vectors
from keras_secondorder.arguments import (
    check_bounds,
    check_counts,
    check_damping,
    check_numbers,
    check_one_of,
    check_rates,
    check_step_rule,
    check_together,
)
from keras_secondorder.capture import FALLBACKS, table
from keras_secondorder.curvature import (
    APPROXIMATIONS,
    FISHERS,
    SHARINGS,
    TIKHONOV,
    Inverses,
    fisher_model,
)
from keras_secondorder.likelihoods import effective_examples
from keras_secondorder.optimizers.base import SecondOrderOptimizer, StepResult, is_due
from keras_secondorder.optimizers.step_report import UNMEASURED, Measured, compare
from keras_secondorder.solvers.bounds import reference_loss
from keras_secondorder.solvers.damping import AdaptiveDamping, reduction_ratio
from keras_secondorder.solvers.step_rules import Proposal, Step, StepRule, rule_for


class Candidate(NamedTuple):
    """A step with the factored damping that it belongs to."""

    gamma: object
    inverses: Inverses
    direction: list
    step: Step


@keras.saving.register_keras_serializable(package="keras_secondorder")
class KFAC(SecondOrderOptimizer):
    """Kronecker-factored approximate curvature (Martens & Grosse).

    For an affine layer with input `a` (a 1 appended), pre-activation gradient `g` and
    weight matrix `W = [kernel; bias]`:

    ```
    A, G = E[a a^T], E[g g^T]                         # running averages
    U    = (A + pi gamma I)^-1 dW (G + gamma / pi I)^-1
    d    = alpha U + mu d_previous                    # alpha, mu from the step rule
    W   -= learning_rate * d
    ```

    Args:
        learning_rate: A number, a schedule, or "adaptive": from the quadratic model.
        momentum: `mu`: a number, a schedule, or "adaptive" (with an adaptive learning
            rate only). "auto" is "adaptive" there, and 0.9 otherwise.
        damping: `lambda`: a number, a schedule, or an `AdaptiveDamping` object.
            "auto" is 0.2 of each block's mean eigenvalue, more while `rho` is poor;
            with an adaptive learning rate, 0.01 in units of the first loss.
        norm_constraint: Bound on `delta^T F delta` of a step: a number, a schedule, a
            `RelativeRadius`, or None. "auto" is `RelativeRadius()` with a given
            learning rate, and none with an adaptive one.
        relative_step: Bound on a layer's step as a share of its weights: a number, a
            schedule, a `RelativeStep` ("auto"), or None, as with an adaptive rate.
        step_rule: A `StepRule` with its own momentum and bounds in place of these; a
            fixed learning rate still scales its steps.
        approximation: Form of the approximate Fisher matrix: "block_diagonal", or
            "block_tridiagonal" to see dense layers with the next one, or
            "eigenvalue_corrected" for EKFAC.
        tikhonov: How `lambda I` enters: "factored", as above, or "exact", through the
            eigenbases of A and G; not for "block_tridiagonal".
        fisher: "sampled" draws one target an example from the model's predictions,
            "exact" sums over all of them, "empirical" takes the labels.
        statistics_fraction: Share of the batch for statistics, tau1; 64 rows at least,
            one for each position of an output. "auto" is a quarter, of at most 128.
        quadratic_fraction: Share for the quadratic model, tau2; 64 rows at least.
        statistics_every: Steps between two updates of A and G.
        inverse_every: Steps between two updates of the inverses, T3.
        statistics_decay: Largest weight of the past in A and G.
        on_unsupported: Block of variables without a Kronecker block: "diagonal",
            "gradient" or "error". `coverage(model)` shows them.
        max_factor_size: Largest side of a factor; a larger one is diagonal.
        rank: Rank of the inverses of factors at least three times as large, apart from
            a multiple of the identity, in the block-diagonal form with factored
            damping; None inverts all of them whole.
        factor_memory: Bytes for all factors and inverses, a quarter of the machine's
            memory by default; the largest factors are split until they fit.
        weight_sharing: "expand" or "reduce", for layers that use their weights at
            several positions; see `docs/layers.md`.
        seed: Seed of the sampled targets.
        **kwargs: Keras's shared arguments (`weight_decay`, `use_ema`, ...). Clipping
            applies to the direction `d`.

    Raises:
        ValueError: Arguments that do not go together, or a model with a layer that
            `on_unsupported="error"` refuses.

    Example:
        >>> import keras, keras_secondorder as kso
        >>> keras.utils.set_random_seed(0)
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile(optimizer=kso.KFAC(), loss="mse")
        >>> x = keras.random.normal((64, 4), seed=0)
        >>> history = model.fit(x, x[:, :1], epochs=30, verbose=0)
        >>> history.history["loss"][-1] < 0.01
        True

    References:
        Martens (2016), thesis, chapter 6 and appendix B; Martens & Grosse (2015).
        Examples enter the statistics with the weights that they have in the loss,
        which the sources leave open. George et al. (2018) for "eigenvalue_corrected".
    """

    def __init__(
        self,
        learning_rate=0.3,
        momentum="auto",
        damping="auto",
        norm_constraint="auto",
        relative_step="auto",
        step_rule=None,
        approximation: str = "block_diagonal",
        tikhonov: str = "factored",
        fisher: str = "sampled",
        statistics_fraction: float | str = "auto",
        quadratic_fraction: float = 0.125,
        statistics_every: int = 4,
        inverse_every: int = 20,
        statistics_decay: float = 0.9,
        on_unsupported: str = "diagonal",
        max_factor_size: int = 8192,
        rank: int | None = 128,
        factor_memory: int | None = None,
        weight_sharing: str = "expand",
        seed: int = 0,
        **kwargs,
    ):
        bounds = norm_constraint, relative_step
        check_rates(learning_rate, momentum)
        check_bounds(*bounds, learning_rate)
        check_step_rule(step_rule, learning_rate, momentum, *bounds)
        check_one_of("approximation", approximation, APPROXIMATIONS)
        check_together("tikhonov", tikhonov, "approximation", approximation, TIKHONOV)
        check_one_of("fisher", fisher, FISHERS)
        check_one_of("on_unsupported", on_unsupported, FALLBACKS)
        check_one_of("weight_sharing", weight_sharing, SHARINGS)
        check_numbers({"statistics_fraction": statistics_fraction}, 1, auto=True)
        check_numbers({"quadratic_fraction": quadratic_fraction}, 1)
        check_numbers({"statistics_decay": statistics_decay}, 1)
        check_counts(
            {
                "statistics_every": statistics_every,
                "inverse_every": inverse_every,
                "max_factor_size": max_factor_size,
            },
            optional={"rank": rank, "factor_memory": factor_memory},
        )
        check_damping(damping, kwargs, blocks=True)
        adaptive = learning_rate == "adaptive"
        super().__init__(1.0 if adaptive else learning_rate, **kwargs)
        self.adaptive = adaptive
        self.momentum = momentum
        self.damping = damping
        self.norm_constraint = norm_constraint
        self.relative_step = relative_step
        self.step_rule = step_rule
        self.approximation = approximation
        self.tikhonov = tikhonov
        self.fisher = fisher
        self.statistics_fraction = statistics_fraction
        self.quadratic_fraction = quadratic_fraction
        self.statistics_every = statistics_every
        self.inverse_every = inverse_every
        self.statistics_decay = statistics_decay
        self.on_unsupported = on_unsupported
        self.max_factor_size = max_factor_size
        self.rank = rank
        self.factor_memory = factor_memory
        self.weight_sharing = weight_sharing
        self.seed = seed

    @classmethod
    def thesis(cls, damping=150.0, **kwargs):
        """K-FAC with the settings of Martens' thesis, chapter 6.

        Args:
            damping: `lambda` at the start, or an `AdaptiveDamping` object.
            **kwargs: Constructor arguments that replace those of the thesis.
        """
        rule = isinstance(damping, AdaptiveDamping)
        settings = {
            "damping": damping if rule else AdaptiveDamping(damping),
            "learning_rate": "adaptive",
            "statistics_fraction": 0.25,
            "quadratic_fraction": 0.25,
            "statistics_every": 1,
            "statistics_decay": 0.95,
            "rank": None,
        }
        return cls(**{**settings, **kwargs})

    def _rule(self) -> StepRule:
        if self.step_rule is not None:
            return self.step_rule
        return rule_for(
            self.adaptive, self.momentum, self.norm_constraint, self.relative_step
        )

    def build_state(self, model):
        """Create factors, inverses, the previous direction and the scalars."""
        auto = {"initial": 0.2, "minimum": 0.2, "relative": True}
        if self._rule().needs_model:
            auto = {"initial": None, "minimum": None, "share": 0.01}
        auto = AdaptiveDamping(every=20, gamma_every=None, **auto)
        rule = auto if self.damping == "auto" else self.damping
        self.curvature = self.form(
            model,
            self.add_variable,
            self.on_unsupported,
            self.max_factor_size,
            self.factor_memory,
            self.weight_sharing,
            self.compiled_by_xla,
            self.rank,
            getattr(rule, "relative", False),
        )
        self._announced = False
        self.previous = tuple(
            self.add_variable(v.shape, "zeros", "float32", name=f"direction_{i}")
            for i, v in enumerate(model.trainable_variables)
        )
        self.build_damping(auto)
        initial = getattr(self.damping_rule, "initial", None) or 0.0
        self.gamma = self.add_scalar("gamma", float(initial) ** 0.5)
        self.rho = self.add_scalar("rho", float("nan"))
        self.reference = self.add_scalar("reference_loss", 0.0)

    def announce(self):
        """Print once which variables fell back, if some did."""
        fell_back = [b for b in self.curvature.plan if b.wrapper is None]
        if fell_back and not self._announced:
            print("KFAC has no Kronecker block for:", table(fell_back), sep="\n")
        self._announced = True

    @property
    def form(self):
        """The class of the approximate Fisher matrix."""
        return TIKHONOV[self.tikhonov][self.approximation]

    @property
    def blocks(self):
        """The curvature blocks, with their factors and inverses as variables."""
        return self.curvature.blocks

    @property
    def wrappers(self):
        """The layers that are watched during a step."""
        return self.curvature.wrappers

    def step(self, objective) -> StepResult:
        """One step of K-FAC on one batch."""
        curvature, k = self.curvature, ops.cast(self.iterations, "int32")
        whole = objective.whole_batch(self.statistics_fraction)
        rows = curvature.rows_pay(objective.examples)
        linear = objective.linearize(taps=whole or rows)
        (loss, *z), inputs, weights = linear.outputs, *linear.aux[:2]
        gradient, taps = objective.gradient(linear)
        finite = ops.logical_and(ops.isfinite(loss), vectors.is_finite(gradient))

        curvature.update(
            ops.logical_and(finite, is_due(k, self.statistics_every)),
            self.statistics_decay,
            objective,
            linear,
            fisher=self.fisher,
            fraction=self.statistics_fraction,
            seed=self.seed,
            counter=k,
        )
        examples = effective_examples(linear.aux.weights, objective.examples)
        damping, gamma = self._damping(k, loss, gradient, examples)
        trial = ops.logical_and(finite, self._trial_due(k))
        refresh = ops.logical_or(is_due(k, self.inverse_every), trial)
        refresh, cached = ops.logical_and(finite, refresh), curvature.cached_inverses()
        inverses = ops.cond(
            refresh, lambda: curvature.damped_inverses(gamma), lambda: cached
        )

        def quadratic_model():
            damped = curvature.ridge(damping), self.quadratic_fraction
            return fisher_model(objective, weights, gradient, *damped)

        rule = self._rule()
        model = quadratic_model() if rule.needs_model else None
        *previous, before = vectors.values([*self.previous, self.reference])
        reference = reference_loss(before, loss, k, objective.uninformed, z, weights)
        known = (previous, gradient, loss, reference, self.learning_rate, k)
        known += (objective.parameters, curvature.places, model)

        def propose(gamma, inverses):
            U = curvature.precondition(gradient, inverses, gamma**2, inputs, taps)
            step = rule.step(Proposal(U, *known))
            return Candidate(gamma, inverses, step.direction(U, previous), step)

        chosen = propose(gamma, inverses)
        if self._tries_gammas(rule):
            chosen = self._best_gamma(trial, propose, chosen)
        curvature.keep_inverses(chosen.inverses, cached)

        step, direction = chosen.step, chosen.direction
        successive = vectors.cosine(direction, previous)
        # NaN where `direction` is. XLA copies `previous` unless its assignment waits.
        finite = ops.logical_and(finite, ops.isfinite(successive))
        logs = {
            "damping": damping,
            "gamma": chosen.gamma,
            "learning_rate": step.alpha * step.learning_rate,
            "momentum": step.mu,
        }
        measured = UNMEASURED
        if self._adapted:
            due = ops.equal((k + 1) % self._damping_rule.every, 0)
            tested = objective, loss, gradient, quadratic_model, chosen, damping
            measured = self._adapt_damping(ops.logical_and(finite, due), *tested)
            (logs["rho"],) = vectors.values([self.rho])
            (after,) = vectors.values([self.damping_value])
            # XLA copies the weights unless their assignment waits for this.
            finite = ops.logical_and(finite, ops.isfinite(after))
        new = [chosen.gamma, *direction, reference]
        vectors.assign([self.gamma, *self.previous, self.reference], new, where=finite)
        seen = loss, gradient, successive, measured
        return StepResult(direction, finite, linear.aux.state, logs, *seen)

    def _tries_gammas(self, rule) -> bool:
        adapted = rule.needs_model and self._adapted
        return adapted and bool(self._damping_rule.gamma_every)

    def _trial_due(self, k):
        """Trials fall on steps with fresh inverses, where `T3` divides `T2`."""
        if not self._tries_gammas(self._rule()):
            return False
        return ops.logical_and(k > 0, ops.equal(k % self._damping_rule.gamma_every, 0))

    def _damping(self, k, loss, gradient, examples):
        """`lambda` and `gamma` of this step."""
        damping = self.damping_at(k, loss, gradient, examples)
        if not self._tries_gammas(self._rule()):
            return damping, ops.sqrt(damping)
        (gamma,) = vectors.values([self.gamma])
        return damping, ops.where(gamma > 0, gamma, ops.sqrt(damping))

    def _best_gamma(self, due, propose, plain):
        """Compare factored dampings by the quadratic model (thesis, 6.6.6)."""

        def trial():
            best = plain
            for gamma in self._damping_rule.gamma_candidates(plain.gamma):
                inverses = self.curvature.redamped(plain.inverses, gamma)
                other = propose(gamma, inverses)
                better = other.step.predicted < best.step.predicted
                best = vectors.choose(better, lambda other=other: other, best)
            return best

        return ops.cond(due, trial, lambda: plain)

    def _adapt_damping(
        self, due, objective, loss, gradient, quadratic_model, chosen, damping
    ) -> Measured:
        """The Levenberg-Marquardt rule on the reduction ratio (thesis, 6.6.5)."""
        (rho,) = vectors.values([self.rho])

        def measured():
            update = vectors.scale(-chosen.step.learning_rate, chosen.direction)
            predicted = chosen.step.predicted
            if predicted is None:
                Q, b = quadratic_model()([update])
                predicted = 0.5 * Q[0, 0] + b[0]
            actual = objective.change(update, loss)
            rho = reduction_ratio(actual, predicted)
            new = self.next_damping(damping, rho)
            dampings = self.curvature.dampings(damping)
            return [rho, new, *compare(predicted, actual, gradient, update, dampings)]

        nan = ops.full((), float("nan"))
        after = ops.cond(due, measured, lambda: [rho, damping, nan, nan, nan])
        vectors.assign([self.rho, self.damping_value], after[:2])
        return Measured(*after[2:])

    def get_config(self):
        """The constructor's arguments."""
        config = super().get_config()
        if self.adaptive:
            config["learning_rate"] = "adaptive"
        return config
