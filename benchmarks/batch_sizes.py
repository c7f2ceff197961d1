"""KFAC() with no argument on the MNIST classifier, at small and large batches."""

import common

args = common.parse_arguments(
    __doc__, batch_sizes=[32, 128, 512, 2000], epochs=3, seeds=1, adam=False
)

import time

import datasets
import keras
import networks
import numpy as np

import keras_secondorder as kso


def main():
    """Train at each batch size and print the table."""
    train, test, data_name = datasets.load_mnist(args.data)
    print(f"{data_name}, {keras.config.backend()}, {args.epochs} epochs")
    print(
        f"{'optimizer':<10}{'batch':>6}{'seed':>6}{'test accuracy':>15}"
        f"{'training loss':>15}{'skipped':>9}{'finite':>8}{'seconds':>9}"
    )
    optimizers = {"KFAC": kso.KFAC} | (
        {"Adam": keras.optimizers.Adam} if args.adam else {}
    )
    for batch_size in args.batch_sizes:
        for seed in range(args.seeds):
            for name, optimizer in optimizers.items():
                row(name, optimizer(), batch_size, seed, train, test)


def row(name, optimizer, batch_size, seed, train, test):
    """Train once and print one line."""
    keras.utils.set_random_seed(seed)
    model = networks.classifier(train[0].shape[1])
    model.compile(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    start = time.perf_counter()
    history = model.fit(
        *train, batch_size=batch_size, epochs=args.epochs, verbose=0
    ).history
    seconds = time.perf_counter() - start
    _, accuracy = model.evaluate(*test, batch_size=1000, verbose=0)
    finite = all(np.isfinite(w).all() for w in model.get_weights())
    skipped = int(history.get("skipped_steps", [0])[-1])
    print(
        f"{name:<10}{batch_size:6d}{seed:6d}{accuracy:15.2%}"
        f"{history['loss'][-1]:15.5f}{skipped:9d}{finite!s:>8}{seconds:9.1f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
