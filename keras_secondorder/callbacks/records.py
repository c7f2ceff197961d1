"""The numbers of a run, in memory and in an event file."""

import math

import numpy as np

from keras_secondorder.callbacks.cards import describe


class Records:
    """Scalars by step and tag; whatever is not finite is left out.

    Args:
        file: An `EventFile` that gets them as well, or None.
    """

    def __init__(self, file=None):
        self.file = file
        self._rows: dict[int, dict[str, float]] = {}

    def scalars(self, step: int, values: dict) -> None:
        """Keep some numbers of a step.

        Args:
            step: Number of steps taken.
            values: Numbers by tag.
        """
        row = self._rows.setdefault(step, {})
        for tag, value in values.items():
            value = float(value)
            if math.isfinite(value):
                row[tag] = value
                if self.file is not None:
                    self.file.scalar(tag, step, value, describe(tag))

    def forget(self, after: int) -> None:
        """Drop the steps after this one: they are taken again."""
        self._rows = {s: row for s, row in self._rows.items() if s <= after}

    def latest(self, after: float = -math.inf, until: float = math.inf) -> dict:
        """The last value of every tag.

        Args:
            after: Only of the steps after this one.
            until: The last step to look at.
        """
        found = {}
        for step in sorted(s for s in self._rows if after < s <= until):
            found.update(self._rows[step])
        return found

    def columns(self) -> dict:
        """A list for "step" and for each tag, NaN where a step has no value."""
        steps = [s for s in sorted(self._rows) if self._rows[s]]
        tags = sorted({tag for s in steps for tag in self._rows[s]})
        return {
            "step": steps,
            **{tag: [self._rows[s].get(tag, np.nan) for s in steps] for tag in tags},
        }


def as_frame(columns: dict):
    """A pandas frame indexed by "step"; the dict itself where pandas is missing."""
    try:
        import pandas
    except ImportError:
        return columns
    return pandas.DataFrame(columns).set_index("step")
