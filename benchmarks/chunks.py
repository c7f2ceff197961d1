"""Peak memory and time of a `HessianFree` step on a full batch, whole and in chunks.

The network is the autoencoder 784-500-250-30 and back, on `--examples` random images,
with three iterations of CG. Each size of a chunk has a process of its own; the peak is
over what the process had once model and data were there. The seconds, of the processor,
are those of the last of `--steps` steps, and the loss is the one that it starts from.
"""

import common

args = common.parse_arguments(
    __doc__, one=-1, steps=2, examples=6000, chunks=[0, 2000, 500]
)

import os
import resource
import subprocess
import sys
import time

import comparison
import keras
import numpy as np

import keras_secondorder as kso

WIDTHS = (500, 250)
HEADER = ["examples in a chunk", "peak, MiB", "CPU seconds", "loss"]


def measure(chunk):
    """Print the numbers of one size; 0 is the whole batch."""
    keras.utils.set_random_seed(0)
    pixels = 784
    model = keras.Sequential([keras.Input((pixels,))])
    for width in (*WIDTHS, 30, *reversed(WIDTHS)):
        model.add(keras.layers.Dense(width, activation="tanh"))
    model.add(keras.layers.Dense(pixels))
    x = np.random.default_rng(0).uniform(size=(args.examples, pixels))
    x = keras.ops.convert_to_tensor(x.astype("float32"))
    with open("/proc/self/statm") as file:
        before = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    optimizer = kso.HessianFree(
        chunk_size=chunk or None, cg_iterations=3, curvature_fraction=1.0
    )
    model.compile(optimizer, "mse")
    for _ in range(args.steps):
        start = time.process_time()
        loss = float(model.train_on_batch(x, x, return_dict=True)["loss"])
        seconds = time.process_time() - start
        model.reset_metrics()
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(peak / 2**20, seconds, loss)


def main():
    """Run each size in a process of its own."""
    if args.one >= 0:
        measure(args.one)
        return
    rows = []
    for chunk in args.chunks:
        command = [sys.executable, __file__, "--one", str(chunk)]
        command += ["--steps", str(args.steps), "--examples", str(args.examples)]
        environment = {**os.environ, "KERAS_BACKEND": keras.config.backend()}
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        peak, seconds, loss = map(float, done.stdout.strip().splitlines()[-1].split())
        name = str(chunk or f"all {args.examples}")
        rows.append([name, f"{peak:.0f}", f"{seconds:.1f}", f"{loss:.6f}"])
    print(keras.config.backend())
    comparison.print_table(HEADER, rows)


if __name__ == "__main__":
    main()
