"""The MNIST autoencoder, 784-1000-500-250-30 and back, trained with K-FAC and Adam.

Martens' benchmark: tanh units, a linear code layer, sparse initialization, sigmoid
cross-entropy summed over the pixels, and an L2 penalty. The number it prints is the
reconstruction error: the squared difference between an image and its reconstruction,
summed over the pixels and averaged over the first 10,000 training images.
"""

import comparison
import datasets


def add_arguments(parser):
    """Adds the arguments that only this example has.

    Args:
        parser: The parser of the command line.
    """
    add = parser.add_argument
    add("--steps", type=int, help="number of steps, instead of --epochs")
    add("--every", type=int, default=10, help="steps between two printed errors")
    add("--optimizer", choices=("both", "kfac", "adam"), default="both")
    add("--thesis", action="store_true", help="K-FAC with the thesis's settings")
    add("--decay", type=float, default=19 / 20, help="of lambda a step, with --thesis")


# Selects the backend, so it has to come before Keras is imported.
args = comparison.parse_arguments(
    __doc__, epochs=5, batch_size=1000, extra=add_arguments
)

import keras
import networks
import numpy as np

import keras_secondorder as kso


def main():
    """Trains with the chosen optimizers, then prints a table and saves a plot."""
    (x, _), _, data_name = datasets.load_mnist(args.data)
    print(f"Data: {data_name}, {len(x)} images. Backend: {keras.config.backend()}")
    steps = args.steps or args.epochs * max(1, len(x) // args.batch_size)
    every = min(args.every, steps)
    steps -= steps % every

    optimizers = {
        "K-FAC": lambda: thesis() if args.thesis else kso.KFAC(),
        "Adam": lambda: keras.optimizers.Adam(1e-3),
    }
    if args.optimizer != "both":
        name = {"kfac": "K-FAC", "adam": "Adam"}[args.optimizer]
        optimizers = {name: optimizers[name]}

    rows, curves = [], {name: [] for name in optimizers}
    for seed in range(args.seeds):
        for name, optimizer in optimizers.items():
            print(f"\n{name}, seed {seed}, batch size {args.batch_size}")
            keras.utils.set_random_seed(seed)
            model = networks.autoencoder(x.shape[1], seed)
            networks.compile_autoencoder(model, optimizer())
            curve = fit(model, x, steps, every, seed)
            curves[name].append(curve)
            seconds, error = curve[-1]
            rows.append([name, str(seed), str(steps), f"{error:.2f}", f"{seconds:.1f}"])

    header = ["optimizer", "seed", "steps", "reconstruction error", "seconds"]
    comparison.print_table(header, rows)
    print("The seconds include compilation, and leave out the evaluations.")
    plot = args.plot or "mnist_autoencoder.png"
    if plot != "none":
        comparison.save_plot(plot, curves, "reconstruction error", data_name)


def thesis():
    """Builds K-FAC with the settings of the thesis: lambda 150, T1 5, T2 and T3 20.

    Returns:
        The optimizer.
    """
    return kso.KFAC.thesis(kso.AdaptiveDamping(150.0, decay=args.decay))


def fit(model, x, steps, every, seed):
    """Trains the model with `fit`, and prints the reconstruction error as it goes.

    Args:
        model: A compiled model.
        x: Images, (examples, pixels).
        steps: Number of batches to train on.
        every: Number of batches between two measurements.
        seed: Seed of the order of the images.

    Returns:
        A list of pairs (seconds, reconstruction error), the first before training.
    """
    part = x[:10_000]

    def reconstruction_error():
        logits = model.predict(part, batch_size=1000, verbose=0)
        pixels = 0.5 * (1.0 + np.tanh(0.5 * logits))  # a sigmoid that can't overflow
        return float(np.mean(np.sum((part - pixels) ** 2, axis=1)))

    def batches():
        generator = np.random.default_rng(seed)
        size = min(args.batch_size, len(x))
        while True:
            order = generator.permutation(len(x))
            for start in range(0, len(x) - size + 1, size):
                batch = x[order[start : start + size]]
                yield batch, batch

    curve = [(0.0, reconstruction_error())]
    clock = comparison.Stopwatch()

    class Record(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            clock.start()

        def on_epoch_end(self, epoch, logs=None):
            curve.append((clock.pause(), reconstruction_error()))
            line = f"step {(epoch + 1) * every:5d}  error {curve[-1][1]:7.2f}"
            print(f"{line}  {curve[-1][0]:6.1f} s", flush=True)

    # What Keras calls an epoch here is the stretch between two measurements.
    model.fit(
        batches(),
        steps_per_epoch=every,
        epochs=steps // every,
        shuffle=False,  # the generator already does
        callbacks=[Record()],
        verbose=0,
    )
    return curve


if __name__ == "__main__":
    main()
