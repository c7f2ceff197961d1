"""Peak memory of K-FAC on Embedding(50,000, 64) and Dense(4,096 -> 1,000).

What `coverage` states is kept: the running factors and their inverses. A step takes
more for a while. The peak is that of a process of its own for each variant, over what
the process had before the optimizer was made; "diagonal" has the same step with no
large factor, so the difference of the last two columns is what the factors take.
"""

import common

args = common.parse_arguments(__doc__, one="", steps=6)

import os
import resource
import subprocess
import sys

import keras
import numpy as np

import keras_secondorder as kso

VARIANTS = {
    "SGD": lambda: keras.optimizers.SGD(),
    "diagonal": lambda: kso.KFAC(max_factor_size=64),
    "K-FAC": lambda: kso.KFAC(),
}


def measure(name):
    """Print a line for one variant: MiB stated, in variables, and at the peak."""
    layers = keras.layers
    ids = keras.Input((64,), dtype="int32")
    h = layers.Flatten()(layers.Embedding(50_000, 64)(ids))
    model = keras.Model(ids, layers.Dense(1000)(h))
    x = np.random.default_rng(0).integers(0, 50_000, (64, 64)).astype("int32")
    y = np.arange(64)
    with open("/proc/self/statm") as file:
        before = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(VARIANTS[name](), loss)
    stated = 0
    if name != "SGD":
        stated = sum(block.bytes for block in kso.coverage(model))
    for _ in range(args.steps):
        model.train_on_batch(x, y)
    kept = sum(4 * np.prod(v.shape) for v in model.optimizer.variables)
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    cells = [f"{value / 2**20:10.0f}" for value in (stated, kept, peak)]
    print(f"{name:10s}", *cells)


def main():
    """Run each variant in a process of its own."""
    if args.one:
        measure(args.one)
        return
    print(f"{keras.config.backend()}: MiB stated, in variables, peak")
    for name in VARIANTS:
        command = [sys.executable, __file__, "--one", name, "--steps", str(args.steps)]
        environment = {**os.environ, "KERAS_BACKEND": keras.config.backend()}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True
        )
        print(done.stdout.strip().splitlines()[-1], flush=True)


if __name__ == "__main__":
    main()
