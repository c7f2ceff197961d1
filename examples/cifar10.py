"""CIFAR-10 classifiers, trained with K-FAC, with SGD and momentum, and with Adam.

Two networks: a ConvNet, three stages of convolution with batch normalization, and an
MLP with rectifiers, after section 4.3 of George's thesis (2017; the widths are ours).
All optimizers start from the same weights and see the same batches for the same number
of epochs. K-FAC runs with its default arguments. With --tune, SGD and Adam take the
best of four learning rates on a validation split.
"""

import comparison
import datasets


def add_arguments(parser):
    """Adds the arguments that only this example has.

    Args:
        parser: The parser of the command line.
    """
    add = parser.add_argument
    add("--model", choices=("conv", "mlp"), default="conv", help="default: %(default)s")
    comparison.add_tuning(parser, "four learning rates for SGD and for Adam")


# Selects the backend, so it has to come before Keras is imported.
args = comparison.parse_arguments(
    __doc__, epochs=10, batch_size=250, extra=add_arguments
)

import functools

import keras
import networks

import keras_secondorder as kso

NETWORKS = {
    "conv": networks.convolutional_network,
    "mlp": networks.rectifier_network,
}
SGD_RATES = (0.01, 0.03, 0.1, 0.3) if args.tune else (0.03,)
ADAM_RATES = (3e-4, 1e-3, 3e-3, 1e-2) if args.tune else (1e-3,)


def main():
    """Trains with all optimizers, then prints a table and saves a plot."""
    train, test, data_name = datasets.load_cifar10(args.data)
    backend = keras.config.backend()
    print(f"Data: {data_name}, {len(train[0])} images. Backend: {backend}")
    sgd = functools.partial(keras.optimizers.SGD, momentum=0.9)
    adam = keras.optimizers.Adam
    candidates = {
        "K-FAC": [("K-FAC", kso.KFAC)],
        "SGD": [(f"SGD {rate:g}", functools.partial(sgd, rate)) for rate in SGD_RATES],
        "Adam": [
            (f"Adam {rate:g}", functools.partial(adam, rate)) for rate in ADAM_RATES
        ],
    }
    build = functools.partial(NETWORKS[args.model], train[0].shape[1:])
    plot = f"cifar10_{args.model}.png"
    comparison.race(args, build, candidates, train, test, data_name, plot)


if __name__ == "__main__":
    main()
