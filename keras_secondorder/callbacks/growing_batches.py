"""Batches that grow as training goes on."""

import math

import keras
import numpy as np


class GrowingBatches(keras.utils.PyDataset):
    """A data set whose batches grow from step to step, for `fit`.

    ```
    m_i = min(first * exp((i - 1) / growth), |S|)
    ```

    with `i` the number of the step since the data set was made. Keras wants as many
    steps in every epoch, so an epoch is `steps` batches here, whatever their size; they
    go through the data in pass after pass, each in a new order. Compiled steps are
    compiled again for each new size, so the sizes in use are `first` times powers of
    `sqrt(2)`, rounded down, and the whole set.

    Args:
        x: Inputs, an array.
        y: Targets, an array, or None.
        sample_weight: Weights, an array, or None.
        first: `m_1`, the first size.
        growth: `b`, the steps in which the size grows by a factor of e.
        steps: Batches in an epoch.
        seed: Seed of the orders.

    Raises:
        ValueError: `first` or `growth` is not positive; the lengths differ.

    Example:
        >>> import numpy as np
        >>> from keras_secondorder.callbacks import GrowingBatches
        >>> data = GrowingBatches(np.arange(40), first=4, growth=5, steps=7)
        >>> [len(data[i][0]) for i in range(len(data))]
        [4, 4, 5, 5, 8, 8, 11]

    References:
        Martens (2016), thesis, section 6.13; the rounding is ours.
    """

    def __init__(
        self,
        x,
        y=None,
        sample_weight=None,
        first: int = 100,
        growth: float = 100.0,
        steps: int = 100,
        seed: int = 0,
    ):
        super().__init__()
        if first < 1 or steps < 1 or growth <= 0:
            raise ValueError(
                "`first` and `steps` must be at least 1 and `growth` positive. "
                f"Received first={first}, steps={steps}, growth={growth}."
            )
        self._arrays = (x, y, sample_weight)
        lengths = {len(a) for a in self._arrays if a is not None}
        if len(lengths) != 1:
            raise ValueError(
                "Inputs, targets and weights must have as many rows as each other. "
                f"Received the lengths {sorted(lengths)}."
            )
        (self._rows,) = lengths
        self._first, self._growth, self._steps = first, growth, steps
        self._seed, self._step, self._start, self._taken = seed, 0, 0, 0

    def size(self, step: int) -> int:
        """`m_i`, rounded as above.

        Args:
            step: `i`, from 1 on.
        """
        powers = math.floor(2 * (step - 1) / self._growth / math.log(2) + 1e-9)
        if powers > 2 * math.log2(self._rows / self._first):
            return self._rows
        return min(self._rows, int(self._first * 2 ** (powers / 2)))

    @property
    def num_batches(self) -> int:
        """`steps`, in every epoch."""
        return self._steps

    def __len__(self):
        return self._steps

    def __getitem__(self, index):
        self._taken = max(self._taken, index + 1)
        start = self._start + self._rows_of(index)
        places = np.arange(start, start + self.size(self._step + index + 1))
        passes, within = np.divmod(places, self._rows)
        rows = np.concatenate(
            [self._order(p)[within[passes == p]] for p in np.unique(passes)]
        )
        batch = [None if a is None else np.asarray(a)[rows] for a in self._arrays]
        while batch[-1] is None:
            batch.pop()
        return tuple(batch)

    def on_epoch_end(self):
        """Go on with the sizes, if this epoch was used to its end."""
        # Keras ends an epoch before the first one too, after a look at the data.
        if self._taken == self._steps:
            self._start += self._rows_of(self._steps)
            self._step += self._steps
        self._taken = 0

    def _rows_of(self, count):
        """Rows in the first batches of this epoch."""
        return sum(self.size(self._step + i + 1) for i in range(count))

    def _order(self, number):
        return np.random.default_rng((self._seed, number)).permutation(self._rows)
