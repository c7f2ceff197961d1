"""Natural gradient with the metric on other data: the restricted MNIST comparison.

A small labelled set is trained on in whole batches; the rest of MNIST serves as inputs
without labels. The metric is measured on the same batch, on another labelled batch, or
on unlabelled inputs, after Pascanu and Bengio (2014), section 4 and table 1. "last" is
the test error at the end, "best" the least along the way.
"""

import common

args = common.parse_arguments(
    __doc__, labelled=2000, batch_size=1000, epochs=15, seeds=3, units=200
)

import statistics

import datasets
import keras
import numpy as np

import keras_secondorder as kso


def network(pixels):
    """A classifier with one hidden layer."""
    return keras.Sequential(
        [
            keras.Input((pixels,)),
            keras.layers.Dense(args.units, activation="tanh"),
            keras.layers.Dense(10),
        ]
    )


def main():
    """Train each variant on each seed and print the table."""
    train, test, data_name = datasets.load_mnist(args.data)
    labelled = min(args.labelled, len(train[0]) // 2)
    size = min(args.batch_size, labelled)
    print(f"{data_name}, {keras.config.backend()}, {labelled} labelled examples")
    errors = {}
    for seed in range(args.seeds):
        order = np.random.default_rng(seed).permutation(len(train[0]))
        x, y = (part[order[:labelled]] for part in train)
        unlabelled = train[0][order[labelled:]]
        variants = {
            "same batch": {},
            "another batch": {"metric_data": x, "metric_rows": size},
            "unlabelled": {"metric_data": unlabelled, "metric_rows": size},
            "covariance, same batch": {"metric": "covariance"},
            "covariance, another": {
                "metric": "covariance",
                "metric_data": (x, y),
                "metric_rows": size,
            },
        }
        for name, options in variants.items():
            keras.utils.set_random_seed(seed)
            model = network(x.shape[1])
            model.compile(
                optimizer=kso.NaturalGradient(**options),
                loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                metrics=["accuracy"],
            )
            history = model.fit(
                x,
                y,
                batch_size=size,
                epochs=args.epochs,
                validation_data=test,
                validation_batch_size=2000,
                verbose=0,
            ).history
            wrong = [100.0 * (1.0 - a) for a in history["val_accuracy"]]
            row = history["loss"][-1], wrong[-1], min(wrong)
            errors.setdefault(name, []).append(row)
    print(f"{'metric on':<24}{'training loss':>14}{'last %':>9}{'best %':>9}")
    for name, rows in errors.items():
        loss, last, best = map(statistics.mean, zip(*rows, strict=True))
        print(f"{name:<24}{loss:14.4f}{last:9.2f}{best:9.2f}")


if __name__ == "__main__":
    main()
