"""Figures 6.1 and 6.2 of George's thesis, on the MNIST autoencoder: error over seconds.

6.1: what taking the mean out does: SGD on centred inputs (`CenteredSGD`), mean-only
batch normalization, batch normalization, and neither. 6.2: `KFAC`, `ACP` with alpha
from the gradients and with a fixed one, batch normalization and plain SGD.

The loss is the squared error, summed over the pixels; the network is 784-250-100-30 and
back (`--wide` is 784-1000-500-250-30) with tanh units. Each method has the same share
of `--minutes`: half of it is for `BiasedRandomSearch` over its numbers, in `--trials`
short trainings, and half for one training with the best of them. All have momentum 0.9.
The seconds leave out the evaluations, and the first step with its compilation, which
is then undone. On a machine with other work, `--cpu` counts seconds of the processor
(of all threads).
"""

import common

args = common.parse_arguments(
    __doc__,
    minutes=20.0,
    trials=8,
    batch_size=500,
    seed=0,
    wide=False,
    cpu=False,
    plots="george_6",
)

import tempfile
import time

import comparison
import datasets
import keras
import keras_tuner
import numpy as np

import keras_secondorder as kso

WIDTHS = (1000, 500, 250) if args.wide else (250, 100)
CODE = 30
PART = 2000  # images that the error is measured on
MEASUREMENTS = 20  # of the error in the last training of a method
RATE = ("rate", 1e-4, 1.0)
DAMPING = ("damping", 1e-3, 1e2)


def sgd(hp):
    """Gradient descent with momentum."""
    return keras.optimizers.SGD(hp.get("rate"), momentum=0.9)


def acp(alpha):
    """ACP with alpha from the gradients, or tuned."""
    return lambda hp: kso.ACP(
        hp.get("rate"),
        damping=hp.get("damping"),
        alpha=hp.get("alpha") if alpha else None,
    )


class Method:
    """What a line of a figure needs.

    Attributes:
        optimizer: A function from hyperparameters to the optimizer.
        ranges: Name, lower and upper end of each hyperparameter.
        normalization: The layer after each affine one, or None.
    """

    def __init__(self, optimizer, *ranges, normalization=None):
        self.optimizer, self.ranges = optimizer, ranges
        self.normalization = normalization


# The moving averages have to keep up with a training of few steps.
def batch_norm():
    """Batch normalization."""
    return keras.layers.BatchNormalization(momentum=0.9)


def mean_only():
    """Batch normalization of the mean alone."""
    return kso.layers.MeanOnlyBatchNormalization(momentum=0.9)


METHODS = {
    "SGD": Method(sgd, RATE),
    "CenteredSGD": Method(lambda hp: kso.CenteredSGD(hp.get("rate"), 0.9), RATE),
    "mean-only batch norm": Method(sgd, RATE, normalization=mean_only),
    "batch norm": Method(sgd, RATE, normalization=batch_norm),
    "KFAC": Method(
        lambda hp: kso.KFAC(
            damping=hp.get("damping"), norm_constraint=hp.get("norm_constraint")
        ),
        DAMPING,
        ("norm_constraint", 1e-4, 10.0),
    ),
    "ACP": Method(acp(False), RATE, DAMPING),
    "ACP, fixed alpha": Method(acp(True), RATE, DAMPING, ("alpha", 1e-3, 10.0)),
}
FIGURES = {
    "1": ("SGD", "CenteredSGD", "mean-only batch norm", "batch norm"),
    "2": ("KFAC", "ACP", "ACP, fixed alpha", "batch norm", "SGD"),
}


def build(method, pixels):
    """The autoencoder of a method; the last layer is a sigmoid."""
    keras.utils.set_random_seed(args.seed)
    model = keras.Sequential([keras.Input((pixels,))])
    for width in (*WIDTHS, CODE, *reversed(WIDTHS)):
        model.add(keras.layers.Dense(width))
        if method.normalization is not None:
            model.add(method.normalization())
        model.add(keras.layers.Activation("linear" if width == CODE else "tanh"))
    model.add(keras.layers.Dense(pixels, activation="sigmoid"))
    return model


def compile_step(model, batch):
    """Take a step and undo it."""
    model.optimizer.build(model.trainable_variables)
    variables = [*model.variables, *model.optimizer.variables]
    before = [np.array(keras.ops.convert_to_numpy(v)) for v in variables]
    model.train_on_batch(batch, batch)
    for variable, value in zip(variables, before, strict=True):
        variable.assign(value)


def train(method, hp, x, seconds, measurements):
    """Train for some seconds; the curve of pairs (seconds, error), and the steps."""
    model = build(method, x.shape[1])
    model.compile(
        optimizer=method.optimizer(hp), loss="mse", loss_weights=float(x.shape[1])
    )
    compile_step(model, x[: args.batch_size])
    clock = comparison.Stopwatch(time.process_time if args.cpu else time.perf_counter)
    part, steps = x[:PART], 0

    def error():
        out = model.predict(part, batch_size=PART, verbose=0)
        return float(np.mean(np.sum((out - part) ** 2, axis=1)))

    curve, random, order = [(0.0, error())], np.random.default_rng(args.seed), []
    for number in range(measurements):
        until = seconds * (number + 1) / measurements
        clock.start()
        while clock.pause() < until:
            clock.start()
            if len(order) < args.batch_size:
                order = list(random.permutation(len(x)))
            rows, order = order[: args.batch_size], order[args.batch_size :]
            model.train_on_batch(x[rows], x[rows])
            steps += 1
        curve.append((clock.seconds, error()))
        if not np.isfinite(curve[-1][1]):
            break
    return curve, steps


def tuned(name, x, seconds):
    """The best hyperparameters that a search of some seconds found."""
    method, space = METHODS[name], keras_tuner.HyperParameters()
    for number in method.ranges:
        space.Float(*number, sampling="log")

    class Search(kso.tuning.BiasedRandomSearch):
        def run_trial(self, trial, **kwargs):
            curve, _ = train(method, trial.hyperparameters, x, seconds / args.trials, 1)
            error = curve[-1][1]
            return error if np.isfinite(error) else 1e9

    with tempfile.TemporaryDirectory() as folder:
        tuner = Search(
            max_trials=args.trials,
            initial_trials=max(1, args.trials // 2),
            elite=1,
            seed=args.seed,
            hyperparameters=space,
            directory=folder,
        )
        tuner.search(verbose=0)
        return tuner.get_best_hyperparameters()[0]


def main():
    """Tune and train every method, print the table, save the figures."""
    (x, _), _, data_name = datasets.load_mnist(args.data)
    share = 60.0 * args.minutes / len(METHODS) / 2
    widths = "-".join(str(w) for w in (x.shape[1], *WIDTHS, CODE))
    print(
        f"{data_name}, {widths} and back, {keras.config.backend()}, batch size "
        f"{args.batch_size}.\nFor each method {args.trials} trials of "
        f"{share / args.trials:.1f} s, then {share:.0f} s with the best"
        f"{', of the processor' * args.cpu}."
    )
    rows, curves = [], {}
    for name in METHODS:
        start = time.perf_counter()
        hp = tuned(name, x, share)
        curves[name], steps = train(METHODS[name], hp, x, share, MEASUREMENTS)
        numbers = ", ".join(f"{k} {v:.3g}" for k, v in hp.values.items())
        error = f"{curves[name][-1][1]:.2f}"
        rows.append([name, error, str(steps), numbers])
        elapsed = time.perf_counter() - start
        print(f"{name}: error {error}, {elapsed:.0f} s in all", flush=True)
    comparison.print_table(["optimizer", "error", "steps", "found"], rows)
    print(
        f"Error: squared, summed over the pixels, mean over the first {PART} training "
        "images."
    )
    if args.plots != "none":
        for number, names in FIGURES.items():
            lines = {name: [curves[name]] for name in names}
            path = f"{args.plots}.{number}.png"
            comparison.save_plot(path, lines, "squared error", f"figure 6.{number}")


if __name__ == "__main__":
    main()
