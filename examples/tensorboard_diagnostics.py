"""The curvature of an MNIST classifier in TensorBoard, with K-FAC and with Adam.

Each optimizer trains 784-500-250-10 for about half a minute, watched by
`CurvatureMonitor`, into a run of its own:

    tensorboard --logdir runs

docs/reading_the_dials.md says what to look for.
"""

import importlib.util
import pathlib

import comparison
import datasets


def extra(parser):
    """Adds this example's arguments."""
    parser.add_argument("--log-dir", default="runs", help="default: %(default)s")
    parser.add_argument(
        "--max-overhead",
        type=float,
        default=0.3,
        help="seconds of watching for each second of training, default: %(default)s",
    )


# Selects the backend, so it has to come before Keras is imported.
args = comparison.parse_arguments(__doc__, epochs=10, batch_size=500, extra=extra)

import keras
import networks

import keras_secondorder as kso


def main():
    """Trains with both optimizers, and prints a page about the last model."""
    train, test, data_name = datasets.load_mnist(args.data)
    print(f"Data: {data_name}. Backend: {keras.config.backend()}")
    rows = []
    for name, optimizer in {"kfac": kso.KFAC, "adam": keras.optimizers.Adam}.items():
        print(f"\n{name}")
        folder = pathlib.Path(args.log_dir) / name
        keras.utils.set_random_seed(0)
        model = networks.classifier(train[0].shape[1])
        model.compile(
            optimizer=optimizer(),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        monitor = kso.callbacks.CurvatureMonitor(
            folder,
            layers_every=100,
            # A run of seconds has no time to spare; see everything all the same.
            max_overhead=None if args.smoke else args.max_overhead,
            final_look=True,
        )
        callbacks = [monitor]
        if importlib.util.find_spec("tensorflow"):  # Keras's own callback needs it
            callbacks.insert(0, keras.callbacks.TensorBoard(folder))
        model.fit(
            *train,
            batch_size=args.batch_size,
            epochs=args.epochs,
            callbacks=callbacks,
            verbose=0 if args.quiet else 2,
        )
        _, accuracy = model.evaluate(*test, batch_size=1000, verbose=0)
        found = monitor.latest()
        trace = found.get("Network/hessian_trace", float("nan"))
        rows.append(
            [name, f"{accuracy:.2%}", f"{trace:.3g}", f"{monitor.overhead:.0%}"]
        )

        print()
        report = kso.diagnostics.report(model, *test)
        if args.plot not in (None, "none"):
            kso.diagnostics.plot(report, f"{name}_{args.plot}")

    header = ["optimizer", "test accuracy", "trace of the Hessian", "overhead"]
    comparison.print_table(header, rows)
    print(f"\nLook at it with: tensorboard --logdir {args.log_dir}")


if __name__ == "__main__":
    main()
