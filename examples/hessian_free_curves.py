"""The CURVES autoencoder, 784-400-200-100-50-25-6 and back, by Hessian-free steps.

Sigmoid units, a linear code layer, sparse initialization: a network on which the first
layers hear nothing of the error at first. Adam gets the same wall-clock at each of four
learning rates and the better is kept. The number is the reconstruction error, the
squared difference between an image and its reconstruction, summed over the pixels and
averaged over the training images.
"""

import comparison


def add_arguments(parser):
    """Adds the arguments that only this example has.

    Args:
        parser: The parser of the command line.
    """
    add = parser.add_argument
    add("--images", type=int, default=10_000, help="default: %(default)s")
    add("--steps", type=int, default=40, help="of HessianFree; default: %(default)s")
    add("--every", type=int, default=5, help="steps between two measurements")
    add("--adam-batch-size", type=int, help="default: the same as HessianFree's")


# Selects the backend, so it has to come before Keras is imported.
args = comparison.parse_arguments(
    __doc__, epochs=0, batch_size=2500, extra=add_arguments
)
if args.smoke:
    args.images, args.steps, args.every = 500, 4, 2

import datasets
import keras
import networks
import numpy as np

import keras_secondorder as kso

LEARNING_RATES = (3e-4, 1e-3, 3e-3, 1e-2)


def hessian_free():
    """Builds the optimizer: scale-sensitive damping and short runs of CG.

    Returns:
        The optimizer.
    """
    return kso.HessianFree(
        damping_matrix="diagonal",
        damping=kso.AdaptiveDamping(
            0.1, every=1, decay=2 / 3, minimum=1e-6, gamma_every=None
        ),
        cg_iterations=30,
    )


def train(optimizer, x, batch_size, seed, every, steps=None, seconds=None):
    """Trains an autoencoder and measures its error as it goes.

    Args:
        optimizer: A Keras optimizer.
        x: Images, (examples, pixels).
        batch_size: Batch size.
        seed: Seed of the weights and of the order of the images.
        every: Steps between two measurements.
        steps: Number of steps, or None.
        seconds: Seconds of training, or None.

    Returns:
        A list of pairs (seconds, error), and the number of steps.
    """
    keras.utils.set_random_seed(seed)
    model = networks.autoencoder(
        x.shape[1], seed, (400, 200, 100, 50, 25), 6, "sigmoid"
    )
    networks.compile_autoencoder(model, optimizer)
    clock, curve, done = comparison.Stopwatch(), [], 0
    generator, order = np.random.default_rng(seed), []

    def error():
        logits = model.predict(x, batch_size=2500, verbose=0)
        pixels = 0.5 * (1.0 + np.tanh(0.5 * logits))  # a sigmoid that can't overflow
        return float(np.mean(np.sum((x - pixels) ** 2, axis=1)))

    while True:
        clock.start()
        for _ in range(every):
            if len(order) < batch_size:
                order = list(generator.permutation(len(x)))
            rows, order = order[:batch_size], order[batch_size:]
            model.train_on_batch(x[rows], x[rows])
        elapsed = clock.pause()
        done += every
        if (steps and done >= steps) or (seconds and elapsed >= seconds):
            curve.append((elapsed, error()))
            return curve, done
        if not curve or elapsed - curve[-1][0] > (seconds or 0.0) / 20:
            curve.append((elapsed, error()))
            if steps:
                print(f"step {done:4d}  error {curve[-1][1]:7.2f}  {elapsed:6.1f} s")


def main():
    """Trains with HessianFree and with Adam, then prints a table and saves a plot."""
    x = datasets.curves(args.images)
    print(f"CURVES, {len(x)} images. Backend: {keras.config.backend()}")
    size = min(args.batch_size, len(x))
    adam_size = min(args.adam_batch_size or size, len(x))
    rows, curves = [], {}
    for seed in range(args.seeds):
        print(f"\nHessianFree, seed {seed}, batch size {size}")
        curve, done = train(hessian_free(), x, size, seed, args.every, args.steps)
        seconds = curve[-1][0]
        runs = {"HessianFree": (curve, done, size)}
        for rate in LEARNING_RATES[: 1 if args.smoke else None]:
            optimizer = keras.optimizers.Adam(rate)
            curve, done = train(
                optimizer, x, adam_size, seed, 2 * args.every, seconds=seconds
            )
            runs[f"Adam {rate:g}"] = curve, done, adam_size
        for name, (curve, done, batch) in runs.items():
            curves.setdefault(name, []).append(curve)
            cells = [str(seed), str(batch), str(done)]
            rows.append([name, *cells, f"{curve[-1][1]:.2f}", f"{curve[-1][0]:.1f}"])
    header = ["optimizer", "seed", "batch", "steps", "error", "seconds"]
    comparison.print_table(header, rows)
    print("The seconds include compilation, and leave out the evaluations.")
    plot = args.plot or "hessian_free_curves.png"
    if plot != "none":
        comparison.save_plot(plot, curves, "reconstruction error", "CURVES")


if __name__ == "__main__":
    main()
