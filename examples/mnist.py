"""An MNIST classifier, 784-500-250-10, trained with K-FAC and with Adam.

Both optimizers start from the same weights and see the same batches. Nothing is tuned:
both run with their default arguments.
"""

import comparison
import datasets

# Selects the backend, so it has to come before Keras is imported.
args = comparison.parse_arguments(__doc__, epochs=5, batch_size=500)

import keras
import networks

import keras_secondorder as kso


def main():
    """Trains with both optimizers, then prints a table and saves a plot."""
    train, test, data_name = datasets.load_mnist(args.data)
    backend = keras.config.backend()
    print(f"Data: {data_name}, {len(train[0])} images. Backend: {backend}")

    optimizers = {"K-FAC": kso.KFAC, "Adam": keras.optimizers.Adam}
    rows, curves = [], {name: [] for name in optimizers}
    for seed in range(args.seeds):
        for name, optimizer in optimizers.items():
            print(f"\n{name}, seed {seed}")
            keras.utils.set_random_seed(seed)
            model = networks.classifier(train[0].shape[1])
            model.compile(
                optimizer=optimizer(),
                loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                metrics=["accuracy"],
            )
            curve, _ = comparison.fit(
                model, train, args.batch_size, args.epochs, 0 if args.quiet else 1
            )
            _, accuracy = model.evaluate(*test, batch_size=1000, verbose=0)
            curves[name].append(curve)
            seconds, loss = curve[-1]
            rows.append([name, str(seed), f"{accuracy:.2%}", f"{loss:.5f}"])
            rows[-1].append(f"{seconds:.1f}")

    header = ["optimizer", "seed", "test accuracy", "train loss", "seconds"]
    comparison.print_table(header, rows)
    print("The seconds include compilation, and leave out the evaluations.")
    plot = args.plot or "mnist.png"
    if plot != "none":
        comparison.save_plot(plot, curves, "training loss", data_name)


if __name__ == "__main__":
    main()
