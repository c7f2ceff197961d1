"""K-FAC: natural gradient with Kronecker-factored curvature."""

import keras
from keras import ops

from keras_secondorder import vectors
from keras_secondorder.capture import plan_blocks
from keras_secondorder.curvature import make_block, running_average
from keras_secondorder.curvature.statistics import FISHERS, batch_factors
from keras_secondorder.likelihoods import fisher_gram
from keras_secondorder.optimizers.base import SecondOrderOptimizer, StepResult
from keras_secondorder.solvers.damping import LevenbergMarquardt, reduction_ratio
from keras_secondorder.solvers.schedules import at_step, deserialize, serialize
from keras_secondorder.solvers.step_rules import (
    AdaptiveStep,
    Proposal,
    StepRule,
    TrustRegionStep,
)

FIRST_STEPS = 3  # statistics and inverses are fresh in each of these (thesis, 6.8)


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
        learning_rate: A number, a Keras schedule, or "adaptive" for the thesis's step
            lengths from the quadratic model.
        momentum: `mu`: a number, a schedule, or "adaptive" (with an adaptive learning
            rate only).
        damping: `lambda`: a number, a schedule, or a `LevenbergMarquardt` object.
        norm_constraint: Bound on `delta^T F delta` of a step, a number, a schedule or
            None.
        step_rule: A `StepRule` object in place of `learning_rate`, `momentum` and
            `norm_constraint` (a fixed learning rate still scales its steps).
        fisher: Which Fisher matrix: "sampled" draws one target an example from the
            model's own predictions, "exact" sums over all of them, "empirical" takes
            the labels.
        statistics_fraction: Share of the batch that statistics are taken on, tau1; at
            least 64 examples.
        quadratic_fraction: Share for the quadratic model, tau2; at least 64 examples.
        statistics_every: Steps between two updates of A and G.
        inverse_every: Steps between two updates of the inverses, T3.
        statistics_decay: Largest weight of the past in A and G.
        on_unsupported: Block of variables without a Kronecker block: "diagonal",
            "gradient" or "error". `coverage(model)` shows them.
        max_factor_size: Largest side of a factor; layers beyond it get the fallback.
        seed: Seed of the sampled targets.
        **kwargs: Keras's shared arguments (`weight_decay`, `use_ema`, ...). Clipping
            applies to the direction `d`.

    Raises:
        ValueError: Arguments that do not go together, or a model with a layer that
            `on_unsupported="error"` refuses.

    Example:
        >>> import keras, keras_secondorder as kso
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile(optimizer=kso.KFAC(), loss="mse")
        >>> x = keras.random.normal((64, 4), seed=0)
        >>> history = model.fit(x, x[:, :1], epochs=30, verbose=0)
        >>> history.history["loss"][-1] < 0.01
        True

    References:
        Martens (2016), thesis, chapter 6 and appendix B; Martens & Grosse (2015). The
        statistics of a batch enter with the weights that its examples have in the
        loss, which the sources leave open.
    """

    def __init__(
        self,
        learning_rate=0.3,
        momentum=0.9,
        damping=0.1,
        norm_constraint=None,
        step_rule=None,
        fisher: str = "sampled",
        statistics_fraction: float = 0.25,
        quadratic_fraction: float = 0.25,
        statistics_every: int = 2,
        inverse_every: int = 10,
        statistics_decay: float = 0.95,
        on_unsupported: str = "diagonal",
        max_factor_size: int = 8192,
        seed: int = 0,
        **kwargs,
    ):
        adaptive = isinstance(learning_rate, str)
        if adaptive and learning_rate != "adaptive":
            raise ValueError(
                "`learning_rate` must be a number, a schedule or 'adaptive'. "
                f"Received learning_rate={learning_rate!r}."
            )
        if momentum == "adaptive" and not adaptive:
            raise ValueError(
                "momentum='adaptive' comes from the same quadratic model as the "
                f"learning rate. Received learning_rate={learning_rate!r}. "
                "Use learning_rate='adaptive' with it."
            )
        if fisher not in FISHERS:
            raise ValueError(
                f"`fisher` must be one of {FISHERS}. Received fisher={fisher!r}."
            )
        for name, share in (
            ("statistics_fraction", statistics_fraction),
            ("quadratic_fraction", quadratic_fraction),
        ):
            if not 0 < share <= 1:
                raise ValueError(
                    f"`{name}` is a share of the batch, above 0 and at most 1. "
                    f"Received {name}={share}."
                )
        if isinstance(learning_rate, int):
            learning_rate = float(learning_rate)
        super().__init__(1.0 if adaptive else learning_rate, **kwargs)
        self.adaptive = adaptive
        self.momentum = momentum
        self.damping = damping
        self.norm_constraint = norm_constraint
        self.step_rule = step_rule
        self.fisher = fisher
        self.statistics_fraction = statistics_fraction
        self.quadratic_fraction = quadratic_fraction
        self.statistics_every = statistics_every
        self.inverse_every = inverse_every
        self.statistics_decay = statistics_decay
        self.on_unsupported = on_unsupported
        self.max_factor_size = max_factor_size
        self.seed = seed

    @classmethod
    def thesis(cls, damping=150.0, **kwargs):
        """K-FAC with the settings of Martens' thesis, chapter 6.

        Args:
            damping: `lambda` at the start, or a `LevenbergMarquardt` object.
            **kwargs: Constructor arguments that replace those of the thesis.
        """
        settings = {
            "learning_rate": "adaptive",
            "momentum": "adaptive",
            "damping": (
                LevenbergMarquardt(damping)
                if isinstance(damping, int | float)
                else damping
            ),
            "norm_constraint": None,
            "statistics_every": 1,
            "inverse_every": 20,
        }
        return cls(**{**settings, **kwargs})

    def _rule(self) -> StepRule:
        if self.step_rule is not None:
            return self.step_rule
        if self.adaptive:
            momentum = None if self.momentum == "adaptive" else self.momentum
            return AdaptiveStep(momentum, self.norm_constraint)
        return TrustRegionStep(self.momentum, self.norm_constraint)

    def build_state(self, model):
        """Create factors, inverses, the previous direction and the scalars."""
        plan = plan_blocks(model, self.on_unsupported, self.max_factor_size)
        self.blocks = tuple(
            make_block(block, self.add_variable, self.compiled_by_xla) for block in plan
        )
        self.wrappers = tuple(b.wrapper for b in self.blocks if b.wrapper is not None)
        index = {id(v): i for i, v in enumerate(model.trainable_variables)}
        self._places = tuple(
            tuple(index[id(v)] for v in b.variables) for b in self.blocks
        )
        self._adapted = isinstance(self.damping, LevenbergMarquardt)
        self._gamma_every = self.damping.gamma_every if self._adapted else None
        self._eta = tuple(_l2_curvature(v) for v in model.trainable_variables)
        self.previous = tuple(
            self.add_variable(v.shape, "zeros", "float32", name=f"direction_{i}")
            for i, v in enumerate(model.trainable_variables)
        )

        def scalar(name, value=0.0):
            return self.add_variable(
                (), keras.initializers.Constant(value), "float32", name=name
            )

        initial = float(self.damping.initial) if self._adapted else 0.0
        self.damping_value = scalar("damping", initial)
        self.gamma = scalar("gamma", initial**0.5)
        self.rho = scalar("rho", float("nan"))
        self.statistics_count = scalar("statistics_count")

    def step(self, objective) -> StepResult:
        """One step of K-FAC on one batch."""
        k = ops.cast(self.iterations, "int32")
        linear = objective.linearize(taps=self._needs_taps(objective))
        gradient, taps = objective.gradient(linear)
        finite = ops.logical_and(
            ops.isfinite(linear.outputs[0]), vectors.is_finite(gradient)
        )
        self._update_statistics(objective, linear, k, finite)
        damping, gamma = self._damping(k)
        rule = self._rule()
        previous = vectors.values(self.previous)

        def quadratic_model():
            return self._quadratic_model(objective, linear, gradient, damping)

        model = quadratic_model() if rule.needs_model else None

        def propose(gamma, inverses):
            U = self._precondition(gradient, inverses, damping, linear, taps)
            step = rule.step(
                Proposal(
                    U, previous, gradient, linear.outputs[0], self.learning_rate, k, model
                )
            )
            d = vectors.axpy(step.mu, previous, vectors.scale(step.alpha, U))
            return gamma, inverses, d, step

        due = ops.logical_and(finite, _due(k, self.inverse_every))
        cached = [vectors.values(block.inverses) for block in self.blocks]
        fresh = ops.cond(due, lambda: self._inverses(gamma), lambda: cached)
        gamma, inverses, direction, step = propose(gamma, fresh)
        if rule.needs_model and self._gamma_every:
            trial = ops.logical_and(finite, _due(k, self._gamma_every, first=0))
            gamma, inverses, direction, step = self._try_gammas(
                trial, propose, (gamma, inverses, direction, step)
            )
        for block, new in zip(self.blocks, inverses, strict=True):
            vectors.assign(block.inverses, new)
        self.gamma.assign(gamma)

        update = vectors.scale(-step.learning_rate, direction)
        finite = ops.logical_and(finite, vectors.is_finite(update))
        self._adapt_damping(objective, linear, quadratic_model, step, update, k, finite)
        vectors.assign(self.previous, direction, where=finite)
        logs = {
            "damping": damping,
            "gamma": gamma,
            "learning_rate": step.alpha * step.learning_rate,
            "momentum": step.mu,
        }
        if self._adapted:
            (logs["rho"],) = vectors.values([self.rho])
        return StepResult(direction, finite, linear.aux.state, logs)

    def _needs_taps(self, objective) -> bool:
        rows = objective.examples if isinstance(objective.examples, int) else None
        return objective.whole_batch(self.statistics_fraction) or any(
            b.wrapper is not None and b.low_rank_pays(rows) for b in self.blocks
        )

    def _update_statistics(self, objective, linear, k, finite):
        """Average the factors of this batch into the running ones, when due."""
        old = [vectors.values(block.factors) for block in self.blocks]
        count = vectors.values([self.statistics_count])[0] + 1.0

        def averaged():
            new = batch_factors(
                objective,
                linear,
                self.blocks,
                self.fisher,
                self.statistics_fraction,
                self.seed,
                k,
            )
            result = keras.tree.map_structure(
                lambda o, n: running_average(o, n, count, self.statistics_decay),
                old,
                new,
            )
            usable = vectors.is_finite(keras.tree.flatten(result))
            kept = keras.tree.map_structure(
                lambda o, n: ops.where(usable, n, o), old, result
            )
            return kept, ops.where(usable, count, count - 1.0)

        due = ops.logical_and(finite, _due(k, self.statistics_every))
        factors, count = ops.cond(due, averaged, lambda: (old, count - 1.0))
        for block, new in zip(self.blocks, factors, strict=True):
            vectors.assign(block.factors, new)
        self.statistics_count.assign(count)

    def _damping(self, k):
        """`lambda` and `gamma` of this step."""
        if not self._adapted:
            damping = ops.cast(at_step(self.damping, k), "float32")
            return damping, ops.sqrt(damping)
        damping, gamma = vectors.values([self.damping_value, self.gamma])
        if self._gamma_every:
            return damping, gamma
        return damping, ops.sqrt(damping)

    def _inverses(self, gamma):
        """Damped inverses of all factors; the last good one where one fails."""
        result = []
        for block, places in zip(self.blocks, self._places, strict=True):
            factors, old = vectors.values(block.factors), vectors.values(block.inverses)
            eta = self._eta[places[0]]
            new = block.damped_inverses(*factors, gamma, eta)
            usable = vectors.is_finite(new)
            result.append(
                [ops.where(usable, n, o) for n, o in zip(new, old, strict=True)]
            )
        return result

    def _precondition(self, gradient, inverses, damping, linear, taps):
        """`U`, the approximate inverse curvature times the gradient."""
        U = [None] * len(gradient)
        index = 0
        for block, places, inverse in zip(
            self.blocks, self._places, inverses, strict=True
        ):
            rows = None
            if block.wrapper is not None:
                rows = self._rows(block, linear.aux.inputs[index], taps.get(index))
                index += 1
            V = [gradient[i] for i in places]
            strength = damping + self._eta[places[0]]
            values = block.precondition(V, inverse, strength, rows)
            for i, value in zip(places, values, strict=True):
                U[i] = value
        return U

    @staticmethod
    def _rows(block, inputs, taps):
        """`(a, g)` with gradient `a^T g`, where preconditioning them is cheaper."""
        if taps is None or any(v.regularizer is not None for v in block.variables):
            return None
        a, g = block.wrapper.input_rows(inputs), block.wrapper.gradient_rows(taps)
        sides = a.shape[:2]
        rows = None if None in sides else sides[0] * sides[1]
        if not block.low_rank_pays(rows):
            return None
        return ops.reshape(a, (rows, a.shape[-1])), ops.reshape(g, (rows, g.shape[-1]))

    def _quadratic_model(self, objective, linear, gradient, damping):
        """The damped quadratic model with the exact Fisher matrix, as a function."""
        x, rows, weights = objective.subset(self.quadratic_fraction, linear.aux.weights)
        outputs, push = objective.push(x)
        curves = objective.curves(outputs, weights, rows)

        def model(directions):
            Q = fisher_gram(curves, outputs, [push(v) for v in directions])
            ridge = [
                [
                    sum(
                        (damping + eta) * ops.sum(a * b)
                        for eta, a, b in zip(self._eta, u, v, strict=True)
                    )
                    for v in directions
                ]
                for u in directions
            ]
            Q = Q + ops.stack([ops.stack(row) for row in ridge])
            return Q, ops.stack([vectors.dot(v, gradient) for v in directions])

        return model

    def _try_gammas(self, due, propose, plain):
        """Compare three factored dampings by the quadratic model (thesis, 6.6.6)."""

        def trial():
            best = plain
            for gamma in self.damping.gamma_candidates(plain[0]):
                other = propose(gamma, self._inverses(gamma))
                better = other[-1].predicted < best[-1].predicted
                best = keras.tree.map_structure(
                    lambda b, o, better=better: ops.where(better, o, b), best, other
                )
            return best

        return ops.cond(due, trial, lambda: plain)

    def _adapt_damping(self, objective, linear, model, step, update, k, finite):
        """The Levenberg-Marquardt rule on the reduction ratio (thesis, 6.6.5)."""
        if not self._adapted:
            return
        rule = self.damping

        def measured():
            predicted = step.predicted
            if predicted is None:
                Q, b = model()([update])
                predicted = 0.5 * Q[0, 0] + b[0]
            moved = [
                p + ops.cast(u, p.dtype)
                for p, u in zip(objective.parameters, update, strict=True)
            ]
            actual = objective.value(moved) - linear.outputs[0]
            rho = reduction_ratio(actual, predicted)
            return rho, rule.update(old[1], rho)

        due = ops.logical_and(finite, ops.equal((k + 1) % rule.every, 0))
        old = tuple(vectors.values([self.rho, self.damping_value]))
        rho, damping = ops.cond(due, measured, lambda: old)
        self.rho.assign(rho)
        self.damping_value.assign(damping)

    def get_config(self):
        """The constructor's arguments."""
        config = super().get_config()
        if self.adaptive:
            config["learning_rate"] = "adaptive"
        for name in _ARGUMENTS:
            config[name] = serialize(getattr(self, name))
        return config

    @classmethod
    def from_config(cls, config, custom_objects=None):
        """Rebuild the optimizer from its arguments."""
        return cls(**{name: deserialize(value) for name, value in config.items()})


_ARGUMENTS = (
    "momentum",
    "damping",
    "norm_constraint",
    "step_rule",
    "fisher",
    "statistics_fraction",
    "quadratic_fraction",
    "statistics_every",
    "inverse_every",
    "statistics_decay",
    "on_unsupported",
    "max_factor_size",
    "seed",
)


def _due(k, every: int, first: int = FIRST_STEPS):
    """Whether something done every so often, and in the first steps, is due."""
    return ops.logical_or(ops.equal(k % every, 0), k < first)


def _l2_curvature(variable) -> float:
    """`eta`: the second derivative of the L2 penalty on a variable, 0 without one."""
    return 2.0 * float(getattr(variable.regularizer, "l2", 0.0) or 0.0)
