"""What `CurvatureMonitor` costs, with its defaults, on the MNIST classifier.

The same model is trained with and without it in turn. The first fit, which compiles, is
left out. The monitor also counts its own work; what it cannot see (Keras handing logs
over, variables brought up to date on JAX) is in the difference of the two times alone.
"""

import common

args = common.parse_arguments(
    __doc__, batch_size=500, epochs=5, rounds=3, optimizer="kfac"
)

import statistics
import tempfile
import time
import warnings

import datasets
import keras
import networks
import numpy as np

import keras_secondorder as kso


def main():
    """Time both in turn and print the medians."""
    train, _, data_name = datasets.load_mnist(args.data)
    print(f"{data_name}, {keras.config.backend()}, {args.optimizer}", flush=True)
    optimizer = {"kfac": kso.KFAC, "adam": keras.optimizers.Adam}[args.optimizer]
    model = networks.classifier(train[0].shape[1])
    model.compile(
        optimizer=optimizer(),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    initial = [
        np.array(keras.ops.convert_to_numpy(v)) for v in model.trainable_variables
    ]

    def seconds(callbacks):
        for variable, value in zip(model.trainable_variables, initial, strict=True):
            variable.assign(value)
        start = time.perf_counter()
        model.fit(
            *train,
            batch_size=args.batch_size,
            epochs=args.epochs,
            callbacks=callbacks,
            verbose=0,
        )
        return time.perf_counter() - start

    model.fit(*[a[:5000] for a in train], batch_size=args.batch_size, verbose=0)
    warnings.simplefilter("ignore")  # what there was no time for is printed below
    plain, watched, own, points = [], [], [], 0
    for _ in range(args.rounds):
        plain.append(seconds([]))
        with tempfile.TemporaryDirectory() as folder:
            monitor = kso.callbacks.CurvatureMonitor(folder)
            watched.append(seconds([monitor]))
        own.append(monitor.overhead)
        points = len(monitor.latest())
        print(f"{plain[-1]:.2f} s without, {watched[-1]:.2f} s with", flush=True)
    steps = args.epochs * -(-len(train[0]) // args.batch_size)
    before, after = statistics.median(plain), statistics.median(watched)
    print(f"\n{1000 * before / steps:.1f} ms a step without the monitor")
    print(f"{1000 * after / steps:.1f} ms a step with it: {after / before - 1:+.1%}")
    print(f"by its own count {statistics.median(own):.1%}, for {points} numbers")


if __name__ == "__main__":
    main()
