"""Spacing out what costs time, so that all of it stays below a share of training."""

import warnings
from collections.abc import Callable


class Purse:
    """What some tasks may spend: a share of the training time so far.

    Args:
        share: Seconds for each second of training, or None without a limit.
    """

    def __init__(self, share: float | None):
        self.share = share
        self.spent = 0.0

    def allows(self, cost: float, training: float) -> bool:
        """Whether a task of some seconds fits, after some seconds of training."""
        return self.share is None or self.spent + cost <= self.share * training


class Task:
    """Something to do every so often, when its purse allows it.

    Args:
        group: What it belongs to.
        name: What it is called.
        run: A function of the number of steps taken.
        purse: What it is paid from; tasks may share one.
        guess: Seconds that its first run may take.
        every: Steps between two runs, or None: only when `ask` is called.
    """

    def __init__(
        self,
        group: str,
        name: str,
        run: Callable,
        purse: Purse,
        guess: float,
        every: int | None = None,
    ):
        self.group, self.name = group, name
        self._run, self._purse = run, purse
        self._cost, self._every, self._next = guess, every, 0
        self.runs, self._failed = 0, False

    def guess(self, seconds: float) -> None:
        """Say what the first run may take, now that more is known."""
        self._cost = seconds

    def ask(self) -> None:
        """Want a run as soon as it can be paid for."""
        self._next = 0

    def due(self, step: int, training: float) -> bool:
        """Whether to run now.

        Args:
            step: Steps taken.
            training: Seconds of training so far.
        """
        wanted = self._next is not None and step >= self._next and not self._failed
        return wanted and self._purse.allows(self._cost, training)

    def run(self, step: int, clock: Callable) -> None:
        """Run, and pay for it; what fails is a warning, and not asked for again.

        Args:
            step: Steps taken.
            clock: A function that returns seconds.
        """
        start = clock()
        try:
            self._run(step)
        except Exception as error:  # training goes on, whatever could not be measured
            self._every, self._failed = None, True
            warnings.warn(
                f"CurvatureMonitor leaves out '{self.name}' from step {step} on, which "
                f"failed: {error}",
                stacklevel=2,
            )
        finally:
            seconds = clock() - start
            self._purse.spent += seconds
            self.runs += 1
            # A first run may have compiled what later ones only call.
            self._cost = seconds if self.runs > 1 else 0.5 * seconds
            self._next = None if self._every is None else step + self._every
