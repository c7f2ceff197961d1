"""Grid, random and biased random search, a hundred of each, on a small problem.

A search looks for the learning rate, the momentum and the weight decay with which
gradient descent leaves the lowest validation loss after a few epochs on scikit-learn's
digits, a 64-32-10 network. It may train as often as a grid of `--levels` values for
each of the three has points. Each search has a seed of its own for the initial weights
and the order of the batches; the three methods share it.

The numbers are of the best trial of each search. PyTorch compiles nothing, and is the
quickest here by far.
"""

import common

args = common.parse_arguments(__doc__, searches=100, levels=3, epochs=2, batch_size=200)

import tempfile
import time

import datasets
import keras
import keras_tuner
import numpy as np

import keras_secondorder as kso

RANGES = {
    "learning_rate": (1e-3, 10.0),
    "one_minus_momentum": (0.01, 1.0),
    "weight_decay": (1e-6, 1e-1),
}
# KerasTuner's random search adds 1 to its seed for each number it draws: seeds that
# are neighbours would see the same draws.
SEED_DISTANCE = 10_000


class Problem:
    """Trainings of one small network."""

    def __init__(self):
        (x, y), _, _ = datasets.load_mnist("digits")
        self.train, self.validation = (x[:1000], y[:1000]), (x[1000:], y[1000:])
        self.model = keras.Sequential(
            [
                keras.Input((x.shape[1],)),
                keras.layers.Dense(32, activation="relu"),
                keras.layers.Dense(10),
            ]
        )

    def loss(self, hp, seed):
        """The validation loss after a training."""
        random = np.random.default_rng(seed)
        self.model.set_weights(
            [
                random.normal(0.0, (2.0 / w.shape[0]) ** 0.5, w.shape)
                if w.ndim == 2
                else np.zeros(w.shape)
                for w in self.model.get_weights()
            ]
        )
        self.model.compile(
            optimizer=keras.optimizers.SGD(
                hp.get("learning_rate"),
                1.0 - hp.get("one_minus_momentum"),
                weight_decay=hp.get("weight_decay"),
            ),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        x, y = self.train
        for _ in range(args.epochs):
            order = random.permutation(len(x))
            for start in range(0, len(x), args.batch_size):
                rows = order[start : start + args.batch_size]
                self.model.train_on_batch(x[rows], y[rows])
        x, y = self.validation
        self.model.reset_metrics()
        loss = float(self.model.test_on_batch(x, y))
        # A search wants a number of a training that diverged, too.
        return loss if np.isfinite(loss) else 1e6


def space(levels=None):
    """The three ranges, or a grid in the middles of equal parts of them."""
    hp = keras_tuner.HyperParameters()
    for name, (low, high) in RANGES.items():
        if levels is None:
            hp.Float(name, low, high, sampling="log")
        else:
            middles = (np.arange(levels) + 0.5) / levels
            values = low * (high / low) ** middles
            hp.Choice(name, [float(v) for v in values])
    return hp


METHODS = {
    "grid": lambda: (keras_tuner.GridSearch, space(args.levels)),
    "random": lambda: (keras_tuner.RandomSearch, space()),
    "biased": lambda: (kso.tuning.BiasedRandomSearch, space()),
}


def best_of(method, problem, number, folder):
    """The lowest loss that one search found."""
    tuner_class, hyperparameters = METHODS[method]()

    class Search(tuner_class):
        def run_trial(self, trial, **kwargs):
            return problem.loss(trial.hyperparameters, number)

    tuner = Search(
        max_trials=args.levels ** len(RANGES),
        seed=SEED_DISTANCE * (number + 1),
        hyperparameters=hyperparameters,
        directory=folder,
        project_name=f"{method}_{number}",
    )
    tuner.search(verbose=0)
    assert len(tuner.oracle.trials) == args.levels ** len(RANGES)
    return tuner.oracle.get_best_trials()[0].score


def main():
    """Search, and print the table."""
    trials = args.levels ** len(RANGES)
    print(
        f"{args.searches} searches of {trials} trainings each, "
        f"{keras.config.backend()}, {args.epochs} epochs of batches of "
        f"{args.batch_size}",
        flush=True,
    )
    problem, found = Problem(), {}
    for method in METHODS:
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            found[method] = np.array(
                [best_of(method, problem, n, folder) for n in range(args.searches)]
            )
        seconds = time.perf_counter() - start
        losses = found[method]
        print(
            f"{method:<8} average {losses.mean():.4f} (standard error "
            f"{losses.std() / len(losses) ** 0.5:.4f}), median {np.median(losses):.4f},"
            f" best {losses.min():.4f}, worst {losses.max():.4f}, {seconds:.0f} s",
            flush=True,
        )
    for method in ("grid", "random"):
        gain = found[method] - found["biased"]
        print(
            f"biased is lower than {method} by {gain.mean():.4f} on average (standard "
            f"error {gain.std() / len(gain) ** 0.5:.4f}), in {np.mean(gain > 0):.0%} "
            "of the searches"
        )


if __name__ == "__main__":
    main()
