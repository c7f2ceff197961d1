"""What the benchmarks share: the examples' data and networks, and the command line."""

import argparse
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples"))


def parse_arguments(description, **defaults):
    """Parse the command line and select the backend, before Keras is imported."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", metavar="PATH", help="mnist.npz in Keras's layout")
    parser.add_argument("--backend", choices=("jax", "tensorflow", "torch"))
    for name, value in defaults.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, list):
            kind = type(value[0])
            parser.add_argument(flag, type=kind, nargs="+", default=value)
        elif isinstance(value, bool):
            parser.add_argument(flag, action="store_true")
        else:
            parser.add_argument(flag, type=type(value), default=value)
    args = parser.parse_args()
    if args.backend:
        os.environ["KERAS_BACKEND"] = args.backend
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    return args
