"""Long memory with a plain RNN: the addition and the temporal-order problems.

A SimpleRNN of 100 tanh units has to remember two marked inputs over a sequence of T
steps. "addition": add the two marked numbers; a sequence is solved within 0.04.
"temporal_order": say in which order two of the symbols X and Y came. Every batch is
new, and so are the sequences on which the share of failures is measured.
"""

import comparison


def add_arguments(parser):
    """Adds the arguments that only this example has.

    Args:
        parser: The parser of the command line.
    """
    add = parser.add_argument
    add("--task", choices=("addition", "temporal_order"), default="addition")
    add("--T", type=int, default=50, help="length of the sequences")
    add("--steps", type=int, default=200, help="most steps of HessianFree")
    add("--every", type=int, default=10, help="steps between two measurements")
    add("--structural", type=float, nargs="+", default=[0.0, 0.1], metavar="MU")
    add("--units", type=int, default=100)
    add("--no-adam", action="store_true", help="leave the comparison out")


# Selects the backend, so it has to come before Keras is imported.
args = comparison.parse_arguments(
    __doc__, epochs=0, batch_size=2000, extra=add_arguments
)
if args.smoke:
    args.T, args.steps, args.every, args.units = 10, 4, 2, 20

import keras
import numpy as np

import keras_secondorder as kso

SOLVED = 0.01  # the share of failures below which a task counts as solved
TOLERANCE = 0.04
SYMBOLS = 6  # two that matter, four that distract


def addition(count, T, generator):
    """Draws sequences of numbers, two of which are marked, and their mean.

    Args:
        count: Number of sequences.
        T: Their length.
        generator: NumPy's random generator.

    Returns:
        Inputs (count, T, 2), the number and the mark, and targets (count, 1).
    """
    x = np.zeros((count, T, 2), "float32")
    x[:, :, 0] = generator.random((count, T))
    rows = np.arange(count)
    first = generator.integers(0, max(1, T // 10), count)
    second = generator.integers(max(1, T // 10), max(2, T // 2), count)
    x[rows, first, 1] = x[rows, second, 1] = 1.0
    y = (x[rows, first, 0] + x[rows, second, 0]) / 2
    return x, y[:, None].astype("float32")


def temporal_order(count, T, generator):
    """Draws sequences of symbols, two of which are X or Y, and their order.

    Args:
        count: Number of sequences.
        T: Their length.
        generator: NumPy's random generator.

    Returns:
        One-hot inputs (count, T, 6) and classes (count,) of XX, XY, YX and YY.
    """
    symbols = generator.integers(2, SYMBOLS, (count, T))
    rows = np.arange(count)
    which = generator.integers(0, 2, (count, 2))
    first = generator.integers(T // 10, max(T // 10 + 1, 2 * T // 10), count)
    second = generator.integers(5 * T // 10, max(5 * T // 10 + 1, 6 * T // 10), count)
    symbols[rows, first], symbols[rows, second] = which[:, 0], which[:, 1]
    return np.eye(SYMBOLS, dtype="float32")[symbols], 2 * which[:, 0] + which[:, 1]


TASKS = {"addition": addition, "temporal_order": temporal_order}


def network(optimizer, seed):
    """Builds and compiles the recurrent network.

    Args:
        optimizer: A Keras optimizer.
        seed: Seed of the initial weights.

    Returns:
        The compiled model.
    """
    features = 2 if args.task == "addition" else SYMBOLS
    outputs = 1 if args.task == "addition" else 4

    def sparse(deviation, number):
        return kso.initializers.Sparse(15, stddev=deviation, seed=3 * seed + number)

    model = keras.Sequential(
        [
            keras.Input((args.T, features)),
            keras.layers.SimpleRNN(
                args.units,
                kernel_initializer=sparse(0.3, 0),
                # 15 weights of deviation 0.28: the spectral radius is about 1.1.
                recurrent_initializer=sparse(0.28, 1),
            ),
            keras.layers.Dense(outputs, kernel_initializer=sparse(0.3, 2)),
        ]
    )
    loss = "mse"
    if args.task == "temporal_order":
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss)
    return model


def train(model, seed, steps=None, seconds=None):
    """Trains on new batches until the task is solved, or time is up.

    Args:
        model: The compiled model.
        seed: Seed of the data.
        steps: Most steps, or None.
        seconds: Most seconds of training, or None.

    Returns:
        A list of (seconds, share of failures), and the number of steps.
    """
    generator = np.random.default_rng(1000 + seed)
    task, clock, curve = TASKS[args.task], comparison.Stopwatch(), []
    done, printed = 0, 0.0

    def failures():
        x, y = task(2000, args.T, generator)
        z = model.predict(x, batch_size=2000, verbose=0)
        if args.task == "addition":
            return float(np.mean(np.abs(z - y) > TOLERANCE))
        return float(np.mean(z.argmax(-1) != y))

    while True:
        batches = [task(args.batch_size, args.T, generator) for _ in range(args.every)]
        clock.start()
        for x, y in batches:
            logs = model.train_on_batch(x, y, return_dict=True)
        elapsed = clock.pause()
        done += args.every
        curve.append((elapsed, max(failures(), 1e-4)))
        model.reset_metrics()
        over = (steps and done >= steps) or (seconds and elapsed >= seconds)
        over = over or curve[-1][1] < SOLVED
        if over or elapsed - printed > (seconds or 0.0) / 10:
            line = f"step {done:5d}  loss {float(logs['loss']):.5f}"
            print(f"{line}  failures {curve[-1][1]:7.2%}  {elapsed:6.1f} s", flush=True)
            printed = elapsed
        if over:
            return curve, done


def main():
    """Trains with HessianFree and with Adam, then prints a table and saves a plot."""
    print(f"{args.task}, T = {args.T}. Backend: {keras.config.backend()}")
    rows, curves, longest = [], {}, 0.0

    def run(name, optimizer, seed, **limits):
        print(f"\n{name}, seed {seed}")
        keras.utils.set_random_seed(seed)
        curve, done = train(network(optimizer, seed), seed, **limits)
        curves.setdefault(name, []).append(curve)
        seconds, share = curve[-1]
        solved = "yes" if share < SOLVED else "no"
        rows.append(
            [name, str(seed), str(done), f"{share:.2%}", solved, f"{seconds:.1f}"]
        )
        return seconds

    for seed in range(args.seeds):
        for mu in args.structural:
            optimizer = kso.HessianFree(structural_damping=mu, cg_iterations=100)
            name = f"HessianFree, mu = {mu:g}"
            longest = max(longest, run(name, optimizer, seed, steps=args.steps))
        if not args.no_adam:
            adam = keras.optimizers.Adam(1e-3)
            run("Adam", adam, seed, seconds=longest)
    header = ["optimizer", "seed", "steps", "failures", "solved", "seconds"]
    comparison.print_table(header, rows)
    plot = args.plot or "rnn_long_memory.png"
    if plot != "none":
        comparison.save_plot(plot, curves, "share of failures", args.task)


if __name__ == "__main__":
    main()
