"""CIFAR-10 classifiers, trained with K-FAC, with SGD and momentum, and with Adam.

Two networks: a ConvNet, three stages of convolution with batch normalization, and an
MLP with rectifiers, after section 4.3 of George's thesis (2017; the widths are ours).
All optimizers start from the same weights and see the same batches for the same number
of epochs. K-FAC runs with its default arguments. With --tune, SGD and Adam run at each
of four learning rates, and the one with the lowest training loss is kept.
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
    add("--tune", action="store_true", help="four learning rates for SGD and for Adam")


# Selects the backend, so it has to come before Keras is imported.
args = comparison.parse_arguments(
    __doc__, epochs=10, batch_size=250, extra=add_arguments
)

import keras
import networks

import keras_secondorder as kso

NETWORKS = {
    "conv": networks.convolutional_network,
    "mlp": networks.rectifier_network,
}
# The middle one of each row is used without --tune.
RATES = {"SGD": (0.01, 0.03, 0.1, 0.3), "Adam": (3e-4, 1e-3, 3e-3, 1e-2)}
UNTUNED = {"SGD": 0.03, "Adam": 1e-3}


def optimizers():
    """The optimizers to compare.

    Returns:
        A dictionary from names to lists of `(label, optimizer)`, of which the best
        one counts.
    """
    found = {"K-FAC": [("K-FAC", kso.KFAC())]}
    for name in RATES:
        found[name] = []
        for rate in RATES[name] if args.tune else (UNTUNED[name],):
            if name == "SGD":
                optimizer = keras.optimizers.SGD(rate, momentum=0.9)
            else:
                optimizer = keras.optimizers.Adam(rate)
            found[name].append((f"{name} {rate:g}", optimizer))
    return found


def run(optimizer, train, test, seed):
    """Trains one network with one optimizer.

    Args:
        optimizer: A Keras optimizer.
        train: Images and labels.
        test: Images and labels to test on.
        seed: Seed of the weights and of the order of the images.

    Returns:
        The training loss in evaluation mode, the loss in the last epoch's logs, the
        test accuracy, and the curve of the loss against the seconds.
    """
    keras.utils.set_random_seed(seed)
    model = NETWORKS[args.model](train[0].shape[1:])
    model.compile(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    verbose = 0 if args.quiet else 2
    curve, history = comparison.fit(model, train, args.batch_size, args.epochs, verbose)
    loss, _ = model.evaluate(*train, batch_size=1000, verbose=0)
    _, accuracy = model.evaluate(*test, batch_size=1000, verbose=0)
    return loss, history["loss"][-1], accuracy, curve


def main():
    """Trains with all optimizers, then prints a table and saves a plot."""
    train, test, data_name = datasets.load_cifar10(args.data)
    backend = keras.config.backend()
    print(f"Data: {data_name}, {len(train[0])} images. Backend: {backend}")
    rows, curves = [], {}
    for seed in range(args.seeds):
        for name, candidates in optimizers().items():
            results = []
            for label, optimizer in candidates:
                print(f"\n{label}, seed {seed}", flush=True)
                loss, logged, accuracy, curve = run(optimizer, train, test, seed)
                results.append((loss, label, curve))
                cells = [f"{loss:.4f}", f"{logged:.4f}", f"{accuracy:.2%}"]
                rows.append([label, str(seed), *cells, f"{curve[-1][0]:.1f}"])
            _, label, curve = min(results)
            curves.setdefault(name, []).append(curve)
            if len(results) > 1:
                print(f"\n{label} has the lowest training loss")
    header = ["optimizer", "seed", "train loss", "in the logs", "test", "seconds"]
    comparison.print_table(header, rows)
    print(
        "Train loss: in evaluation mode, over all training images, after training.\n"
        "In the logs: the mean over the batches of the last epoch, in training mode.\n"
        "The seconds include compilation, and leave out the evaluations."
    )
    plot = args.plot or f"cifar10_{args.model}.png"
    if plot != "none":
        comparison.save_plot(plot, curves, "training loss", data_name)


if __name__ == "__main__":
    main()
