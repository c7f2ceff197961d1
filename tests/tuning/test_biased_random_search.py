"""Biased random search: the distribution of its draws, resuming, K-FAC's rates."""

import subprocess
import sys

import keras
import keras_tuner
import numpy as np
import pytest

import keras_secondorder as kso
from keras_secondorder.tuning import BiasedRandomSearch, BiasedRandomSearchOracle

DRAWS = 4000
# Kolmogorov's distance of so many draws exceeds this in one case of ten thousand. The
# seeds are fixed, so that a test which passes goes on passing.
DISTANCE = 2.23 / DRAWS**0.5


def space():
    hp = keras_tuner.HyperParameters()
    hp.Float("rate", 1e-4, 1.0, sampling="log")
    hp.Int("units", 1, 8)
    hp.Choice("activation", ["relu", "tanh", "gelu"])
    return hp


def oracle_with(tmp_path, trials, **kwargs):
    """An oracle that was told the scores of some trials."""
    kwargs = {"initial_trials": 2, "max_trials": 10**6, "hyperparameters": space()} | (
        kwargs
    )
    oracle = BiasedRandomSearchOracle(keras_tuner.Objective("loss", "min"), **kwargs)
    oracle._set_project_dir(tmp_path, "search")
    for values, score in trials:
        tell(oracle, values, score)
    return oracle


def tell(oracle, values, score):
    """Run one trial of given values."""
    draw, oracle.populate_space = (
        oracle.populate_space,
        lambda trial_id: {
            "status": "RUNNING",
            "values": values,
        },
    )
    trial = oracle.create_trial("tuner")
    oracle.populate_space = draw
    oracle.update_trial(trial.trial_id, {"loss": score})
    trial.status = "COMPLETED"
    oracle.end_trial(trial)


def values(rate, units, activation):
    return {"rate": rate, "units": units, "activation": activation}


FIRST = [
    (values(1e-2, 2, "tanh"), 0.1),
    (values(0.9, 7, "gelu"), 0.2),
    (values(1e-4, 1, "relu"), 5.0),
]


def draws(oracle, first=100):
    """Many draws with the same trials behind them."""
    return [
        oracle.populate_space(str(n))["values"] for n in range(first, first + DRAWS)
    ]


def distance(sample, cdf):
    """Kolmogorov's distance of a sample from a distribution on [0, 1]."""
    sample = np.sort(sample)
    steps = np.arange(len(sample) + 1) / len(sample)
    at = cdf(sample)
    return max(np.max(steps[1:] - at), np.max(at - steps[:-1]))


def reflected_normal_cdf(v, spread):
    """P(u <= q), from many normal numbers folded into [0, 1]: another way to it."""
    n = np.random.default_rng(123).normal(v, spread, 400_000)
    folded = np.sort(np.abs((n + 1.0) % 2.0 - 1.0))
    return lambda q: np.searchsorted(folded, q) / len(folded)


def in_unit(rates):
    return np.log(np.array(rates) / 1e-4) / np.log(1e4)


def test_first_trials_are_uniform(tmp_path):
    found = draws(oracle_with(tmp_path, FIRST[:1], seed=1))
    assert distance(in_unit([f["rate"] for f in found]), lambda q: q) < DISTANCE
    for name, count in (("units", 8), ("activation", 3)):
        _, counts = np.unique([f[name] for f in found], return_counts=True)
        assert len(counts) == count
        p = 1 / count
        assert np.all(np.abs(counts / DRAWS - p) < 4 * (p * (1 - p) / DRAWS) ** 0.5)


@pytest.mark.parametrize("exploration", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("elite", [1, 2])
def test_later_trials_follow_the_algorithm(tmp_path, elite, exploration):
    spread = 0.15
    oracle = oracle_with(
        tmp_path, FIRST, elite=elite, exploration=exploration, spread=spread, seed=2
    )
    found = draws(oracle)
    around = [
        reflected_normal_cdf(in_unit(trial["rate"]), spread)
        for trial, _ in FIRST[:elite]
    ]

    def cdf(q):
        biased = np.mean([near(q) for near in around], axis=0)
        return exploration * q + (1 - exploration) * biased

    assert distance(in_unit([f["rate"] for f in found]), cdf) < DISTANCE
    # A choice without an order stays, or is drawn anew with probability `spread`.
    anew = exploration + (1 - exploration) * spread
    for name in ("tanh", "gelu", "relu"):
        centers = [trial["activation"] for trial, _ in FIRST[:elite]]
        expected = anew / 3 + (1 - anew) * np.mean([c == name for c in centers])
        share = np.mean([f["activation"] == name for f in found])
        assert abs(share - expected) < 4 * (expected * (1 - expected) / DRAWS) ** 0.5


def test_elite_are_the_best_of_either_direction(tmp_path):
    oracle = oracle_with(tmp_path, FIRST, elite=1, exploration=0.0, spread=1e-6)
    assert all(abs(f["rate"] - 1e-2) < 1e-4 for f in draws(oracle)[:20])
    oracle.objective = keras_tuner.Objective("loss", "max")
    assert all(abs(f["rate"] - 1e-4) < 1e-6 for f in draws(oracle)[:20])


def test_scores_that_are_not_finite_are_not_drawn_around(tmp_path):
    trials = [*FIRST, (values(0.3, 4, "relu"), -np.inf), (values(0.3, 5, "relu"), None)]
    oracle = oracle_with(tmp_path, trials[:-1], elite=1, exploration=0.0, spread=1e-6)
    assert all(abs(f["rate"] - 1e-2) < 1e-4 for f in draws(oracle)[:20])


def test_a_small_space_is_gone_through_once(tmp_path):
    hp = keras_tuner.HyperParameters()
    hp.Choice("a", [1, 2, 3])
    hp.Boolean("b")

    class Search(BiasedRandomSearch):
        def run_trial(self, trial, **kwargs):
            hp = trial.hyperparameters
            return hp.get("a") + hp.get("b")

    tuner = Search(
        max_trials=50, exploration=0.0, seed=0, hyperparameters=hp, directory=tmp_path
    )
    tuner.search(verbose=0)
    tried = [
        tuple(t.hyperparameters.values.values()) for t in tuner.oracle.trials.values()
    ]
    assert len(tried) == len(set(tried)) == 6


def test_conditions_are_kept(tmp_path):
    hp = keras_tuner.HyperParameters()
    hp.Choice("kind", ["plain", "momentum"])
    with hp.conditional_scope("kind", ["momentum"]):
        hp.Float("momentum", 0.0, 0.99)

    trials = [({"kind": "plain"}, 0.1), ({"kind": "momentum", "momentum": 0.5}, 0.2)]
    oracle = oracle_with(tmp_path, trials, hyperparameters=hp, elite=2, spread=0.5)
    # Met after these trials, as by a plain `if` in `build`.
    oracle.hyperparameters.Float("decay", 0.0, 1.0)
    found = draws(oracle)
    assert distance([f["decay"] for f in found], lambda q: q) < DISTANCE
    for f in found[:200]:
        assert ("momentum" in f) == (f["kind"] == "momentum")


def test_interrupted_search_resumes_as_if_it_had_not_been(tmp_path):
    class Search(BiasedRandomSearch):
        stop = None

        def run_trial(self, trial, **kwargs):
            if self.stop is not None and len(self.oracle.end_order) == self.stop:
                raise KeyboardInterrupt
            return (trial.hyperparameters.Float("x", -10, 10) - 3) ** 2

    def search(name, stop=None, **kwargs):
        arguments = {"max_trials": 12, "elite": 2, "seed": 0} | kwargs
        tuner = Search(directory=tmp_path, project_name=name, **arguments)
        tuner.stop = stop
        try:
            tuner.search(verbose=0)
        except KeyboardInterrupt:
            pass
        return [
            t.hyperparameters.values for _, t in sorted(tuner.oracle.trials.items())
        ]

    whole = search("whole")
    search("parts", stop=7)
    # The settings come from the state, whatever the second process says.
    resumed = search("parts", elite=5, seed=99)
    assert resumed == whole and len(whole) == 12
    assert search("other", seed=1) != whole


def test_it_finds_what_random_search_does_not(tmp_path):
    """The least of a bowl in four numbers, over 5 seeds of 40 trials each."""

    class Search(BiasedRandomSearch):
        def run_trial(self, trial, **kwargs):
            found = trial.hyperparameters.values.values()
            return sum((v - 0.7) ** 2 for v in found)

    def best(seed, exploration):
        hp = keras_tuner.HyperParameters()
        for name in "abcd":
            hp.Float(name, 0.0, 1.0)
        tuner = Search(
            max_trials=40,
            exploration=exploration,
            seed=seed,
            hyperparameters=hp,
            directory=tmp_path,
            project_name=f"{seed}_{exploration}",
        )
        tuner.search(verbose=0)
        return tuner.oracle.get_best_trials()[0].score

    biased, random = (np.mean([best(n, e) for n in range(5)]) for e in (0.2, 1.0))
    assert biased < 0.5 * random


def test_tunes_kfac(tmp_path):
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).normal(size=(128, 4)).astype("float32")
    y = np.tanh(x[:, :1])

    def build(hp):
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(hp.Int("units", 2, 8), activation="tanh"),
                keras.layers.Dense(1),
            ]
        )
        damping = hp.Float("damping", 1e-3, 10.0, sampling="log")
        # Tracing each of the models takes far longer than training it.
        eager = keras.backend.backend() == "tensorflow"
        model.compile(
            optimizer=kso.KFAC(damping=damping), loss="mse", run_eagerly=eager
        )
        return model

    tuner = BiasedRandomSearch(
        build, "loss", max_trials=2, initial_trials=1, seed=0, directory=tmp_path
    )
    tuner.search(x, y, batch_size=128, epochs=2, verbose=0)
    assert all(t.status == "COMPLETED" for t in tuner.oracle.trials.values())
    model = tuner.get_best_models()[0]
    best = tuner.oracle.get_best_trials()[0].score
    assert isinstance(model.optimizer, kso.KFAC)
    assert model.evaluate(x, y, verbose=0) < 2 * best + 0.1


@pytest.mark.parametrize(
    "wrong",
    [
        *({"initial_trials": 0}, {"elite": 0}, {"spread": 0.0}, {"exploration": 1.1}),
        *({"max_trials": 0}, {"seed": -1}, {"seed": 1.5}),
    ],
)
def test_numbers_outside_their_range_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        BiasedRandomSearchOracle("loss", **wrong)


def test_keras_tuner_is_imported_on_use_and_asked_for():
    code = (
        "import sys; sys.modules['keras_tuner'] = None\n"
        "import keras_secondorder as kso\n"
        "assert 'BiasedRandomSearch' in dir(kso.tuning)\n"
        "kso.tuning.BiasedRandomSearch\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 1
    assert "pip install keras-tuner" in run.stderr.splitlines()[-1]
