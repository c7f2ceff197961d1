"""What backends answer whose derivatives cannot leave a compiled function.

TensorFlow's tapes and PyTorch's graphs belong to the code that recorded them, so that
products run op by op where they are asked for.
"""

import contextlib


def compiled(function):
    """The function itself."""
    return function


def portable(product, vector):
    """The product itself: it never leaves a compiled function."""
    return product


def stepwise():
    """Nothing to switch off: outside of a compiled function loops run in Python."""
    return contextlib.nullcontext()
