"""Which part of a step takes how much time, seen from outside of it."""

import numpy as np
from scipy.optimize import nnls

from keras_secondorder.diagnostics import has_blocks

MOST = 1000  # the latest steps that are looked at
FEWEST = 40
WARM_UP = 5  # steps that compile, or whose intervals are others


class StepTimes:
    """Times of steps, and their parts by least squares.

    Some parts of a step are due every few steps only. Steps with and without them take
    different times, which tells what each part takes:

    ```
    seconds(k) ~ rest + sum over parts of  due(part, k) * seconds(part)
    ```

    with all of them non-negative.

    Args:
        intervals: Steps between two runs, and the phase, `{part: (every, phase)}`: the
            part is due in step k where `(k + phase) % every == 0`.
    """

    def __init__(self, intervals: dict):
        # What is due in every step cannot be told from the rest.
        self._intervals = {n: e for n, e in intervals.items() if e[0] > 1}
        self._seconds, self._due, self._last = [], [], None
        self._seen = 0

    def finished(self, k: int, time: float) -> None:
        """Take down when step number `k`, from 0, was finished.

        Args:
            k: Number of steps before it.
            time: Seconds, without those that others than training took.
        """
        before, self._last = self._last, (k, time)
        self._seen += 1
        if before is None or k <= before[0] or self._seen <= WARM_UP:
            return
        due = [
            (k + phase) // every - (before[0] + phase) // every
            for every, phase in self._intervals.values()
        ]
        self._seconds.append(time - before[1])
        self._due.append([k - before[0], *due])
        del self._seconds[:-MOST], self._due[:-MOST]

    def pause(self) -> None:
        """Forget the last step: what comes next is no pure training time."""
        self._last = None

    @property
    def seconds(self) -> float:
        """The median time of a step, 0 while none is known."""
        if not self._seconds:
            return 0.0
        return float(np.median(self._seconds) / np.median([d[0] for d in self._due]))

    def shares(self) -> dict:
        """The share of each part in the time of the steps, and that of the "rest".

        Returns:
            Numbers that sum to 1; empty while fewer than 40 steps were seen.
        """
        if len(self._seconds) < FEWEST:
            return {}
        # A step that the machine interrupted says nothing about its parts.
        seconds, due = np.array(self._seconds), np.array(self._due, float)
        kept = seconds <= 10 * np.median(seconds)
        parts, _ = nnls(due[kept], seconds[kept])
        spent = parts * due[kept].sum(axis=0)
        if not spent.sum() > 0:
            return {}
        names = ("rest", *self._intervals)
        return dict(zip(names, (spent / spent.sum()).tolist(), strict=True))


def intervals_of(optimizer) -> dict:
    """When the parts of a K-FAC step are due, for `StepTimes`; empty for others."""
    if not has_blocks(optimizer):
        return {}
    found = {
        "statistics": (optimizer.statistics_every, 0),
        "inverses": (optimizer.inverse_every, 0),
    }
    rule = optimizer.damping_rule
    if rule is not None:
        found["reduction_ratio"] = (rule.every, 1)
        if rule.gamma_every:
            found["gamma_trials"] = (rule.gamma_every, 0)
    return found
