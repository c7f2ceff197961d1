"""Batches that grow as training goes on."""

import itertools
import math
from collections.abc import Iterator

import keras
import numpy as np

from keras_secondorder.arguments import check_count, check_range


def growing_batches(
    x,
    y=None,
    sample_weight=None,
    first: int = 100,
    growth: float = 100.0,
    seed: int = 0,
) -> Iterator[tuple]:
    """Batches that grow from step to step, without end, for `fit`.

    ```
    m_i = min(first * exp((i - 1) / growth), |S|)
    ```

    with `i` the number of the step. The batches go through the data in pass after pass,
    each in a new order; `fit` needs `steps_per_epoch`. Compiled steps are compiled
    again for each new size, so the sizes in use are `first` times powers of `sqrt(2)`,
    rounded down, and the whole set.

    Args:
        x: Inputs, an array, or a list, tuple or dictionary of arrays, as for `fit`.
        y: Targets, the same, or None.
        sample_weight: Weights, the same, or None.
        first: `m_1`, the first size.
        growth: `b`, the steps in which the size grows by a factor of e.
        seed: Seed of the orders.

    Returns:
        An iterator over `(x,)`, `(x, y)` or `(x, y, sample_weight)`.

    Raises:
        ValueError: A number is outside its range; something is no array, the lengths
            differ, or there are no rows.

    Example:
        >>> import itertools, numpy as np
        >>> from keras_secondorder.callbacks import growing_batches
        >>> batches = growing_batches(np.arange(40), first=4, growth=5)
        >>> [len(x) for (x,) in itertools.islice(batches, 8)]
        [4, 4, 5, 5, 8, 8, 11, 16]

    References:
        Martens (2016), thesis, section 6.13; the rounding is ours.
    """
    check_count("first", first)
    check_range("growth", growth, 0)
    check_count("seed", seed, least=0)
    arrays = [x, y, sample_weight]
    while arrays[-1] is None:
        arrays.pop()
    leaves = [a for a in keras.tree.flatten(arrays) if a is not None]
    if not all(getattr(a, "shape", ()) for a in leaves):
        raise ValueError(
            "Inputs, targets and weights must be arrays with an axis of rows, or lists "
            f"or dictionaries of them. Received {[type(a).__name__ for a in leaves]}."
        )
    lengths = {len(a) for a in leaves}
    if len(lengths) != 1 or lengths == {0}:
        raise ValueError(
            "Inputs, targets and weights must have as many rows as each other, and at "
            f"least one. Received the lengths {sorted(lengths)}."
        )
    return _batches(tuple(arrays), lengths.pop(), first, growth, seed)


def _batches(arrays, rows, first, growth, seed):
    random = np.random.default_rng(seed)
    waiting = np.zeros(0, "int64")
    for step in itertools.count(1):
        size = _size(step, first, growth, rows)
        while len(waiting) < size:
            waiting = np.concatenate([waiting, random.permutation(rows)])
        chosen, waiting = waiting[:size], waiting[size:]
        yield _rows(arrays, chosen)


def _rows(arrays, chosen):
    return keras.tree.map_structure(
        lambda a: None if a is None else np.asarray(a)[chosen], arrays
    )


def _size(step, first, growth, rows) -> int:
    """`m_i`, rounded to the next power of `sqrt(2)` below."""
    powers = math.floor(2 * (step - 1) / growth / math.log(2) + 1e-9)
    if powers > 2 * math.log2(rows / first):
        return rows
    return min(rows, int(first * 2 ** (powers / 2)))
