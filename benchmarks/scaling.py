"""How a step of K-FAC grows with width, depth and batch, beside one of Adam.

Square dense layers with rectifiers and random data: only time and memory count here.
Both optimizers are timed in turn. "slowest" is the longest single step of an interval,
the one with fresh statistics and inverses, over the median one. The bytes are those of
the memory plan: factors and inverses, over the bytes of the weights.
"""

import common

args = common.parse_arguments(
    __doc__,
    widths=[256, 512, 1024, 2048, 4096],
    depths=[2, 4, 8, 16, 32, 64],
    batches=[32, 128, 512, 2048, 8192],
    rounds=2,
    plot="scaling.png",
)

import contextlib
import gc
import io
import statistics
import time

import comparison
import keras
import numpy as np

import keras_secondorder as kso

STEPS = 20  # all intervals of the defaults divide it
# What is held while another side grows: (width, depth, batch).
SERIES = {
    "width": [(width, 2, 1000) for width in args.widths],
    "depth": [(256, depth, 1000) for depth in args.depths],
    "batch": [(1024, 2, batch) for batch in args.batches],
}
HEADER = ["", "size", "Adam ms", "K-FAC ms", "ratio", "slowest", "MiB", "of weights"]


def measure(width, depth, batch):
    """Milliseconds a step of both, the slowest step of K-FAC, and the plan's bytes."""
    x = np.random.default_rng(0).normal(size=(batch, width)).astype("float32")
    models, times = {}, {"Adam": [], "KFAC": []}
    optimizers = {"Adam": keras.optimizers.Adam(1e-4), "KFAC": kso.KFAC()}
    for name, optimizer in optimizers.items():
        hidden = [keras.layers.Dense(width, "relu") for _ in range(depth - 1)]
        model = keras.Sequential(
            [keras.Input((width,)), *hidden, keras.layers.Dense(width)]
        )
        model.compile(optimizer=optimizer, loss="mse")
        for _ in range(STEPS):  # an interval, so that the first steps are over
            model.train_on_batch(x, x)
        models[name] = model
    for _ in range(args.rounds):
        for name, model in models.items():
            steps = []
            for _ in range(STEPS):
                start = time.perf_counter()
                model.train_on_batch(x, x)
                steps.append(time.perf_counter() - start)
            times[name].append(steps)
    with contextlib.redirect_stdout(io.StringIO()):
        blocks = kso.coverage(models["KFAC"])
    mean = {n: statistics.median(map(statistics.fmean, t)) for n, t in times.items()}
    slowest = [max(steps) / statistics.median(steps) for steps in times["KFAC"]]
    kept = sum(b.bytes for b in blocks)
    share = kept / (4 * models["KFAC"].count_params())
    return mean["Adam"], mean["KFAC"], min(slowest), kept, share


def main():
    """Measure each series, print the table and save the picture."""
    backend = keras.config.backend()
    print(f"{backend}, {args.rounds} rounds of {STEPS} steps", flush=True)
    rows, ratios = [], {}
    for name, sizes in SERIES.items():
        for size in sizes:
            adam, kfac, slowest, kept, share = measure(*size)
            number = size[("width", "depth", "batch").index(name)]
            ratios.setdefault(name, []).append((number, kfac / adam))
            shape = "{} x {}, batch {}".format(*size)
            cells = [f"{1000 * adam:.1f}", f"{1000 * kfac:.1f}", f"{kfac / adam:.2f}"]
            cells += [f"{slowest:.1f}", f"{kept / 2**20:.0f}", f"{share:.1f}"]
            rows.append([name, shape, *cells])
            print(*rows[-1], flush=True)
            keras.backend.clear_session()
            gc.collect()
    print()
    comparison.print_table(HEADER, rows)
    if args.plot != "none":
        draw(ratios)


def draw(ratios):
    """The ratio to Adam's step along each series."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(9, 3), sharey=True, layout="constrained")
    for place, (name, points) in zip(axes, ratios.items(), strict=True):
        sizes, values = zip(*points, strict=True)
        place.plot(sizes, values, ".-")
        place.axhline(2.0, color="grey", linestyle=":")
        place.set(xscale="log", xlabel=name, xticks=sizes)
        place.set_xticks([], minor=True)
        place.set_xticklabels(sizes)
    highest = max(value for points in ratios.values() for _, value in points)
    axes[0].set(ylabel="K-FAC's step over Adam's", ylim=(0, 1.1 * highest))
    figure.savefig(args.plot, dpi=100)
    print(f"Saved {args.plot}.")


if __name__ == "__main__":
    main()
