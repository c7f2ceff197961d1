"""What the examples share: arguments, a clock on the training, table and plot."""

import argparse
import os
import time


def parse_arguments(description, epochs, batch_size, extra=None):
    """Parses the command line and selects the Keras backend.

    Keras reads its backend once, when it is imported: call this before that.

    Args:
        description: The example's docstring, shown by `--help`.
        epochs: Default number of epochs.
        batch_size: Default batch size.
        extra: A function that adds the example's own arguments to the parser.

    Returns:
        The parsed arguments. With `--smoke`, they are those of a run of seconds.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", metavar="PATH", help="an .npz in Keras's layout, or 'digits'")
    add("--backend", choices=("jax", "tensorflow", "torch"), help="Keras's if left out")
    add("--epochs", type=int, default=epochs, help="default: %(default)s")
    add("--batch-size", type=int, default=batch_size, help="default: %(default)s")
    add("--seeds", type=int, default=1, metavar="N", help="repeat with N seeds")
    add("--plot", metavar="FILE", help="where the plot goes, 'none' for no plot")
    add("--quiet", action="store_true", help="no progress bars")
    add("--smoke", action="store_true", help="a run of seconds on scikit-learn's data")
    if extra is not None:
        extra(parser)
    args = parser.parse_args()
    if args.smoke:
        args.data, args.quiet, args.plot = "digits", True, args.plot or "none"
        args.epochs, args.batch_size = 2, 250
    if args.backend:
        os.environ["KERAS_BACKEND"] = args.backend
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    return args


class Stopwatch:
    """Counts the seconds spent training, not those spent on measuring the result.

    Args:
        now: A function that tells the time.
    """

    def __init__(self, now=time.perf_counter):
        self.seconds = 0.0
        self._now, self._since = now, None

    def start(self):
        """Starts, or goes on."""
        self._since = self._now()

    def pause(self):
        """Stops counting.

        Returns:
            The seconds counted so far.
        """
        self.seconds += self._now() - self._since
        return self.seconds


def fit(model, train, batch_size, epochs, verbose=0):
    """Trains a model with a plain `fit`, and measures the loss after each epoch.

    Args:
        model: A compiled model, with metrics besides the loss or without.
        train: Inputs and targets.
        batch_size: Batch size.
        epochs: Number of epochs.
        verbose: As in Keras's `fit`.

    Returns:
        A list of pairs (seconds, loss on up to 10,000 training examples), the first
        before training, and Keras's own history.
    """
    import keras

    part = [array[:10_000] for array in train]

    def training_loss():
        logs = model.evaluate(*part, batch_size=1000, verbose=0, return_dict=True)
        return logs["loss"]

    curve = [(0.0, training_loss())]
    clock = Stopwatch()

    class Record(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            clock.start()

        def on_epoch_end(self, epoch, logs=None):
            curve.append((clock.pause(), training_loss()))

    history = model.fit(
        *train,
        batch_size=batch_size,
        epochs=epochs,
        callbacks=[Record()],
        verbose=verbose,
    )
    return curve, history.history


def race(args, build, candidates, train, test, data_name, plot):
    """Trains one classifier with several optimizers; prints a table, saves a plot.

    Each starts from the same weights and sees the same batches. Where a name has
    several candidates, a search comes first: see `search`.

    Args:
        args: The parsed arguments.
        build: A function that makes the network; its outputs are logits.
        candidates: Dictionary from a name to a list of pairs (label, function that
            makes the optimizer). Of those that are trained on all data, the plot shows
            the one with the lowest training loss.
        train: Inputs and labels.
        test: Inputs and labels to test on.
        data_name: What the data are.
        plot: Default file name of the plot.
    """
    rows, curves = [], {}
    for seed in range(args.seeds):
        for name, choices in candidates.items():
            if len(choices) > 1:
                choices = search(args, build, choices, train, seed)
            results = []
            for label, optimizer in choices:
                model, curve, history = train_classifier(
                    args, build, label, optimizer, train, seed
                )
                loss, _ = model.evaluate(*train, batch_size=1000, verbose=0)
                _, accuracy = model.evaluate(*test, batch_size=1000, verbose=0)
                results.append((loss, label, curve))
                cells = [f"{loss:.4f}", f"{history['loss'][-1]:.4f}", f"{accuracy:.2%}"]
                print(*cells, flush=True)
                rows.append([label, str(seed), *cells, f"{curve[-1][0]:.1f}"])
            curves.setdefault(name, []).append(min(results)[2])
    header = ["optimizer", "seed", "train loss", "in the logs", "test", "seconds"]
    print_table(header, rows)
    print(
        "Train loss: in evaluation mode, over all training data, after training.\n"
        "In the logs: the mean over the batches of the last epoch, in training mode.\n"
        "The seconds include compilation, and leave out the evaluations."
    )
    path = args.plot or plot
    if path != "none":
        save_plot(path, curves, "training loss", data_name)


def search(args, build, choices, train, seed):
    """Finds the candidates that train and generalise best, without the test data.

    Each is trained on nine tenths of the training data, `args.search_epochs` times.

    Args:
        args: The parsed arguments.
        build: A function that makes the network.
        choices: Pairs (label, function that makes the optimizer).
        train: Inputs and labels; a tenth of them, drawn by the seed, is held out.
        seed: Seed of the weights and batches.

    Returns:
        The one with the lowest training loss, and the one with the best accuracy on
        the held-out data if that is another.
    """
    import numpy as np

    order = np.random.default_rng(seed).permutation(len(train[0]))
    split, epochs = len(order) // 10, args.search_epochs or args.epochs
    held_out, part = (
        [array[rows] for array in train] for rows in (order[:split], order[split:])
    )
    tried = []
    for choice in choices:
        model, _, _ = train_classifier(args, build, *choice, part, seed, epochs)
        loss, _ = model.evaluate(*part, batch_size=1000, verbose=0)
        _, accuracy = model.evaluate(*held_out, batch_size=1000, verbose=0)
        print(f"{choice[0]}: train loss {loss:.4f}, validation {accuracy:.2%}")
        tried.append((loss if np.isfinite(loss) else np.inf, -accuracy, choice))
    chosen = [min(tried, key=lambda t: t[i])[2] for i in (0, 1)]
    return chosen[: 1 if chosen[0] is chosen[1] else 2]


def train_classifier(args, build, label, optimizer, train, seed, epochs=None):
    """Trains a classifier from weights that the seed alone determines.

    Args:
        args: The parsed arguments.
        build: A function that makes the network.
        label: What to call it on the screen.
        optimizer: A function that makes the optimizer.
        train: Inputs and labels.
        seed: Seed of the weights and batches.
        epochs: Number of epochs, by default that of the arguments.

    Returns:
        The model, and what `fit` of this module returns.
    """
    import keras

    print(f"\n{label}, seed {seed}", flush=True)
    keras.utils.set_random_seed(seed)
    model = build()
    model.compile(
        optimizer=optimizer(),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    verbose = 0 if args.quiet else 2
    epochs = epochs or args.epochs
    return model, *fit(model, train, args.batch_size, epochs, verbose)


def add_tuning(parser, what):
    """Adds the arguments of a search.

    Args:
        parser: The parser of the command line.
        what: What is searched for.
    """
    parser.add_argument("--tune", action="store_true", help=what)
    parser.add_argument(
        "--search-epochs", type=int, help="of each rate; default: as many as --epochs"
    )


def print_table(header, rows):
    """Prints rows under a header, each column as wide as it needs.

    Args:
        header: The columns' names.
        rows: Lists of strings, one for each row.
    """
    lines = [list(header), *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    print()
    for line in lines:
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True)]
        print("  ".join(cells))


def save_plot(path, curves, ylabel, title):
    """Saves a plot of a quantity against the seconds of training.

    Args:
        path: The image's file name.
        curves: Dictionary from an optimizer's name to a list of curves, one for each
            seed; a curve is a list of pairs (seconds, value).
        ylabel: The name of the quantity.
        title: The plot's title.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for number, (name, repeats) in enumerate(curves.items()):
        for repeat, curve in enumerate(repeats):
            seconds, values = zip(*curve, strict=True)
            label = name if repeat == 0 else None
            axes.plot(seconds, values, ".-", color=f"C{number}", label=label)
    axes.set(xlabel="seconds of training", ylabel=ylabel, yscale="log", title=title)
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)
    print(f"\nSaved {path}")
