"""Peak memory of K-FAC on Embedding(50,000, 64) and Dense(4,096 -> 1,000).

`coverage` states what is kept, the running factors and their inverses, and what a step
works in while they are renewed. The peak is that of a process of its own for each
variant, over what the process had before the optimizer was made; "diagonal" has the
same step with no large factor, so what the factors take is the peak over its peak, and
is to be within what is stated. The last column is the time of a step that renews
everything, after two warm ones. `--positions` is the number of embedded ids, 64 inputs
of the dense layer each; `--forms` adds the forms that decompose. (To find chains in a
functional model its config is read, for which Keras imports TensorFlow, 440 MB.)
"""

import common

args = common.parse_arguments(__doc__, one="", steps=3, positions=64, forms=False)

import os
import resource
import subprocess
import sys
import time

import comparison
import keras
import numpy as np

import keras_secondorder as kso

VARIANTS = {
    "SGD": lambda: keras.optimizers.SGD(),
    "diagonal": lambda: kso.KFAC(max_factor_size=64),
    "K-FAC": lambda: kso.KFAC(),
}
FORMS = {
    "exact damping": lambda: kso.KFAC(tikhonov="exact"),
    "EKFAC": lambda: kso.KFAC(approximation="eigenvalue_corrected"),
    "tridiagonal": lambda: kso.KFAC(approximation="block_tridiagonal"),
}
HEADER = ["", "kept", "more", "in variables", "peak", "over diagonal", "seconds"]
MIB = 2**20


def measure(name):
    """Print the numbers of one variant, in bytes and seconds."""
    layers = keras.layers
    ids = keras.Input((args.positions,), dtype="int32")
    h = layers.Flatten()(layers.Embedding(50_000, 64)(ids))
    h = layers.Dense(1000)(h)
    if args.forms:  # a chain
        h = layers.Dense(500)(layers.ReLU()(h))
    model = keras.Model(ids, h)
    generator = np.random.default_rng(0)
    x = generator.integers(0, 50_000, (64, args.positions)).astype("int32")
    y = np.arange(64)
    with open("/proc/self/statm") as file:
        before = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile({**VARIANTS, **FORMS}[name](), loss)
    blocks = [] if name == "SGD" else kso.coverage(model)
    for _ in range(args.steps):
        start = time.perf_counter()
        model.train_on_batch(x, y)
        seconds = time.perf_counter() - start
    stated = [sum(b.bytes for b in blocks), sum(b.working_bytes for b in blocks)]
    kept = sum(4 * int(np.prod(v.shape)) for v in model.optimizer.variables)
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(*stated, kept, peak, seconds)


def main():
    """Run each variant in a process of its own."""
    if args.one:
        measure(args.one)
        return
    rows, diagonal = [], 0
    for name in {**VARIANTS, **(FORMS if args.forms else {})}:
        command = [sys.executable, __file__, "--one", name, "--steps", str(args.steps)]
        command += ["--positions", str(args.positions)] + ["--forms"] * args.forms
        environment = {**os.environ, "KERAS_BACKEND": keras.config.backend()}
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        *sizes, seconds = map(float, done.stdout.strip().splitlines()[-1].split())
        diagonal = sizes[-1] if name == "diagonal" else diagonal
        sizes.append(sizes[-1] - diagonal if diagonal else 0.0)
        rows.append([name, *(f"{v / MIB:.0f}" for v in sizes), f"{seconds:.2f}"])
    print(f"MiB and seconds, {keras.config.backend()}")
    comparison.print_table(HEADER, rows)


if __name__ == "__main__":
    main()
