"""Random search that stays near the best trials so far."""

import math

import keras_tuner
import numpy as np

from keras_secondorder.arguments import check_at_least, check_count, check_range

# Draws that may repeat a trial before the search looks elsewhere, or ends.
ATTEMPTS = 20
SETTINGS = ("initial_trials", "elite", "spread", "exploration")


class BiasedRandomSearchOracle(keras_tuner.Oracle):
    """Draw hyperparameters around those of a good trial, or anywhere.

    A hyperparameter is a number `u` in [0, 1): where it lies in its range, on the scale
    of its `sampling`, or among its choices.

    ```
    in the first `initial_trials`, and then with probability `exploration`:
        u ~ U(0, 1)                                    # as random search does
    else:
        v = one of the `elite` best trials, each as likely
        u = v + spread * n,   n ~ N(0, 1)              # reflected at 0 and at 1
        u = v, or with probability `spread` u ~ U(0, 1)  # choices without an order
    ```

    With `exploration=1` it is random search. Trials that failed or whose score is not
    finite are not drawn around. No combination is tried twice.

    Args:
        objective: As in KerasTuner: the name of a metric, or an `Objective`.
        max_trials: Number of trials.
        initial_trials: Trials with a score before the first biased one.
        elite: How many of the best trials are drawn around.
        spread: Standard deviation of the draws, as a share of the range; in (0, 1].
        exploration: Share of the later trials that are drawn from the whole range, in
            [0, 1].
        seed: Seed of the draws. Each trial has a stream of its own, so that a search
            which is resumed draws what it would have drawn.
        **kwargs: Other arguments of `keras_tuner.Oracle`.

    Raises:
        ValueError: A number outside its range.

    References:
        George (2017), thesis, section 4.1 and algorithm 1, for the idea that draws are
        biased by the trials before them. The distribution above is ours.
    """

    def __init__(
        self,
        objective=None,
        max_trials: int = 10,
        initial_trials: int = 5,
        elite: int = 3,
        spread: float = 0.1,
        exploration: float = 0.2,
        seed: int | None = None,
        **kwargs,
    ):
        if max_trials is not None:  # KerasTuner takes 0 for None, without end
            check_count("max_trials", max_trials)
        if seed is not None:
            check_count("seed", seed, least=0)
        check_count("initial_trials", initial_trials)
        check_count("elite", elite)
        check_range("spread", spread, 0, 1)
        check_at_least("exploration", exploration, 0, 1)
        super().__init__(objective, max_trials, seed=seed, **kwargs)
        if seed is not None:
            self.seed = seed  # KerasTuner takes 0 for none
        self.initial_trials = initial_trials
        self.elite = elite
        self.spread = spread
        self.exploration = exploration

    def populate_space(self, trial_id: str) -> dict:
        """The values of a trial.

        Args:
            trial_id: Its number, as a string.

        Returns:
            A dictionary of "status" and "values" by name; the status is "STOPPED" where
            nothing was found that had not been tried.
        """
        random = np.random.default_rng((self.seed, int(trial_id)))
        best = self._best_trials()
        biased = best and random.uniform() >= self.exploration
        tried = [trial.hyperparameters.values for trial in self.trials.values()]
        for attempt in range(2 * ATTEMPTS):
            near = None
            if biased and attempt < ATTEMPTS:
                near = best[random.integers(len(best))].hyperparameters
            values = self._draw(random, near)
            if values not in tried:
                return {"status": "RUNNING", "values": values}
        return {"status": "STOPPED", "values": None}

    def _best_trials(self) -> list:
        """The trials that are drawn around; none at first."""
        # By number first: a search that is resumed reads its trials in any order.
        ended = [
            trial
            for _, trial in sorted(self.trials.items())
            if trial.status == "COMPLETED" and math.isfinite(trial.score)
        ]
        largest_first = self.objective.direction == "max"
        ended.sort(key=lambda trial: trial.score, reverse=largest_first)
        return ended[: self.elite] if len(ended) >= self.initial_trials else []

    def _draw(self, random, near) -> dict:
        """Values by name, of the hyperparameters whose conditions hold."""
        drawn = keras_tuner.HyperParameters()
        for parameter in self.get_space().space:
            drawn.merge([parameter])
            if drawn.is_active(parameter):
                v = None
                # A trial of before the parameter was met has no value of it.
                known = near is not None and parameter.name in near.values
                if known and near.is_active(parameter):
                    v = parameter.value_to_prob(near.values[parameter.name])
                u = self._place(random, v, _is_ordered(parameter))
                drawn.values[parameter.name] = parameter.prob_to_value(u)
        return drawn.values

    def _place(self, random, v, ordered) -> float:
        """`u` in [0, 1), around `v` or anywhere."""
        if v is None or (not ordered and random.uniform() < self.spread):
            return random.uniform()
        if not ordered:
            return v
        return reflected(v + self.spread * random.normal())

    def get_state(self) -> dict:
        """What a search is resumed from."""
        return super().get_state() | {name: getattr(self, name) for name in SETTINGS}

    def set_state(self, state: dict) -> None:
        """Go on as the saved search would have."""
        super().set_state(state)
        for name in SETTINGS:
            setattr(self, name, state[name])


class BiasedRandomSearch(keras_tuner.Tuner):
    """A KerasTuner tuner that draws by `BiasedRandomSearchOracle`.

    Args:
        hypermodel: A function of `hp` that returns a compiled model, or a `HyperModel`.
        objective: As in KerasTuner: the name of a metric, or an `Objective`.
        max_trials: Number of trials.
        initial_trials: See `BiasedRandomSearchOracle`, as for the next four.
        elite: How many of the best trials are drawn around.
        spread: Standard deviation of the draws, as a share of the range.
        exploration: Share of the later trials that are drawn from the whole range.
        seed: Seed of the draws.
        hyperparameters: A search space, where `hypermodel` does not make all of it.
        **kwargs: Other arguments of `keras_tuner.Tuner` (`directory`, ...).

    Raises:
        ValueError: A number outside its range.

    Example:
        >>> import tempfile
        >>> from keras_secondorder.tuning import BiasedRandomSearch
        >>> class Search(BiasedRandomSearch):
        ...     def run_trial(self, trial, **kwargs):  # in place of training a model
        ...         return (trial.hyperparameters.Float("x", -10, 10) - 3) ** 2
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     tuner = Search(max_trials=30, seed=0, directory=folder)
        ...     tuner.search(verbose=0)
        >>> abs(tuner.get_best_hyperparameters()[0].get("x") - 3) < 0.5
        True

    References:
        George (2017), thesis, section 4.1.
    """

    def __init__(
        self,
        hypermodel=None,
        objective=None,
        max_trials: int = 10,
        initial_trials: int = 5,
        elite: int = 3,
        spread: float = 0.1,
        exploration: float = 0.2,
        seed: int | None = None,
        hyperparameters=None,
        **kwargs,
    ):
        oracle = BiasedRandomSearchOracle(
            objective,
            max_trials,
            initial_trials,
            elite,
            spread,
            exploration,
            seed,
            hyperparameters=hyperparameters,
        )
        super().__init__(oracle, hypermodel, **kwargs)


def reflected(u: float) -> float:
    """A number mirrored at 0 and at 1 until it lies between them, 1 left out.

    Args:
        u: A number.

    Returns:
        A number in [0, 1).
    """
    u = abs(u) % 2.0
    return min(2.0 - u if u > 1.0 else u, math.nextafter(1.0, 0.0))


def _is_ordered(parameter) -> bool:
    """Whether neighbouring values are alike: numbers, and choices that say so."""
    boolean = isinstance(parameter, keras_tuner.engine.hyperparameters.Boolean)
    return getattr(parameter, "ordered", not boolean)
