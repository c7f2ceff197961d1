"""Spacing out what costs time, so that all of it stays below a share of training."""

import warnings
from collections.abc import Callable


class Purse:
    """What some tasks may spend: a share of the training time so far.

    Args:
        share: Seconds for each second of training, or None without a limit.
        whole: The purse that this one is a part of, or None. What is spent is taken
            from there too, and first runs, which may compile, from there alone: a part
            would save for minutes until it could pay for one.
    """

    def __init__(self, share: float | None, whole: "Purse | None" = None):
        self.share, self.whole = share, whole
        self.spent = 0.0

    def allows(self, cost: float, training: float, first: bool = False) -> bool:
        """Whether a task of some seconds fits, after some seconds of training."""
        if self.whole is not None and not self.whole.allows(cost, training):
            return False
        if self.share is None or (first and self.whole is not None):
            return True
        return self.spent + cost <= self.share * training

    def pay(self, seconds: float, first: bool = False) -> None:
        """Spend some seconds."""
        if self.whole is not None:
            self.whole.pay(seconds)
        if self.whole is None or not first:
            self.spent += seconds


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
        return wanted and self._purse.allows(self._cost, training, first=not self.runs)

    def run(self, step: int, clock: Callable) -> Exception | None:
        """Run, and pay for it; what fails is not asked for again.

        Args:
            step: Steps taken.
            clock: A function that returns seconds.

        Returns:
            Why it failed, or None.
        """
        start = clock()
        try:
            self._run(step)
            return None
        except Exception as error:  # training goes on, whatever could not be measured
            self._every, self._failed = None, True
            return error
        finally:
            seconds = clock() - start
            self._purse.pay(seconds, first=not self.runs)
            self.runs += 1
            # A first run may have compiled what later ones only call.
            self._cost = seconds if self.runs > 1 else 0.5 * seconds
            self._next = None if self._every is None else step + self._every


def run_all(tasks, step: int, clock: Callable) -> None:
    """Run some tasks; those that fail for the same reason are one warning.

    Args:
        tasks: An iterable of `Task` objects.
        step: Steps taken.
        clock: A function that returns seconds.
    """
    failed = {}
    for task in tasks:
        error = task.run(step, clock)
        if error is not None:
            failed.setdefault(str(error), []).append(f"'{task.name}'")
    for error, names in failed.items():
        warnings.warn(
            f"CurvatureMonitor leaves out {', '.join(names)} from step {step} on, "
            f"which failed: {error}",
            stacklevel=2,
        )
