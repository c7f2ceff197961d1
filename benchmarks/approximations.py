"""The forms of K-FAC's Fisher matrix on the MNIST autoencoder, step by step.

Each form trains the same network from the same weights on the same batches. The error
is the squared difference between an image and its reconstruction, summed over the
pixels, on the first 10,000 training images. `--thesis` takes the settings of Martens'
thesis in place of the defaults; `--fraction` is the share of each batch for statistics
and for the quadratic model. Seconds are those of training, with compilation.
"""

import common

args = common.parse_arguments(
    __doc__,
    batch_size=1000,
    steps=200,
    every=20,
    seeds=1,
    fraction=0.25,
    decay=19 / 20,
    thesis=False,
    only=[""],
    plot="approximations.png",
)

import comparison
import datasets
import keras
import networks
import numpy as np

import keras_secondorder as kso
from keras_secondorder.curvature import APPROXIMATIONS


def optimizer(approximation):
    """K-FAC with one form of the matrix; everything else is the same for all."""
    settings = {
        "approximation": approximation,
        "statistics_fraction": args.fraction,
        "quadratic_fraction": args.fraction,
    }
    if args.thesis:
        rule = kso.AdaptiveDamping(150.0, decay=args.decay)
        return kso.KFAC.thesis(rule, **settings)
    return kso.KFAC(**settings)


def main():
    """Train with each form on each seed; print the table and save the plot."""
    (x, _), _, data_name = datasets.load_mnist(args.data)
    names = [n for n in APPROXIMATIONS if args.only == [""] or n in args.only]
    curves = {name: [] for name in names}
    print(f"{data_name}, {keras.config.backend()}, batch {args.batch_size}")
    for seed in range(args.seeds):
        for name in names:
            keras.utils.set_random_seed(seed)
            model = networks.autoencoder(x.shape[1], seed)
            networks.compile_autoencoder(model, optimizer(name))
            curves[name].append(fit(model, x, seed))
            step, seconds, error = curves[name][-1][-1]
            print(f"{name}, seed {seed}: {error:.3f} after {step} steps", flush=True)
    mean = {name: np.mean(repeats, axis=0) for name, repeats in curves.items()}
    first = mean[names[0]]
    header = ["steps", *names, *(f"{n} / {names[0]}" for n in names[1:])]
    rows = []
    for k in range(len(first)):
        errors = [mean[name][k][2] for name in names]
        ratios = [error / errors[0] for error in errors[1:]]
        rows.append(
            [f"{first[k][0]:.0f}", *(f"{e:.2f}" for e in errors)]
            + [f"{r:.3f}" for r in ratios]
        )
    rows.append(["seconds", *(f"{mean[name][-1][1]:.1f}" for name in names)])
    rows[-1] += [f"{mean[name][-1][1] / first[-1][1]:.2f}" for name in names[1:]]
    comparison.print_table(header, rows)
    if args.plot != "none":
        plot(curves, data_name)


def fit(model, x, seed):
    """Train, and measure every so many steps: `[(steps, seconds, error), ...]`."""
    part, size = x[:10_000], min(args.batch_size, len(x))

    def error():
        logits = model.predict(part, batch_size=1000, verbose=0)
        pixels = 0.5 * (1.0 + np.tanh(0.5 * logits))
        return float(np.mean(np.sum((part - pixels) ** 2, axis=1)))

    def batches():
        generator = np.random.default_rng(seed)
        while True:
            order = generator.permutation(len(x))
            for start in range(0, len(x) - size + 1, size):
                batch = x[order[start : start + size]]
                yield batch, batch

    curve, clock = [(0, 0.0, error())], comparison.Stopwatch()

    class Record(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            clock.start()

        def on_epoch_end(self, epoch, logs=None):
            curve.append(((epoch + 1) * args.every, clock.pause(), error()))

    model.fit(
        batches(),
        steps_per_epoch=args.every,
        epochs=args.steps // args.every,
        shuffle=False,
        callbacks=[Record()],
        verbose=0,
    )
    return curve


def plot(curves, title):
    """Error against steps, and against seconds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 4), sharey=True, layout="constrained")
    for number, (name, repeats) in enumerate(curves.items()):
        for repeat, curve in enumerate(repeats):
            steps, seconds, errors = zip(*curve, strict=True)
            label = name if repeat == 0 else None
            for ax, along in zip(axes, (steps, seconds), strict=True):
                ax.plot(along, errors, ".-", color=f"C{number}", label=label)
    axes[0].set(xlabel="steps", ylabel="reconstruction error", yscale="log")
    axes[1].set(xlabel="seconds of training")
    axes[0].legend()
    figure.suptitle(title)
    figure.savefig(args.plot, dpi=150)
    plt.close(figure)
    print(f"\nSaved {args.plot}")


if __name__ == "__main__":
    main()
