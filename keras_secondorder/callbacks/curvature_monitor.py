"""A callback that shows the curvature of training, in TensorBoard and without it."""

import collections
import pathlib
import time
import warnings
import weakref

import keras
from keras import ops

from keras_secondorder.arguments import check_count, check_range
from keras_secondorder.callbacks.batch import (
    arguments_of_fit,
    check_data,
    first_rows,
    misfit,
)
from keras_secondorder.callbacks.budget import Purse, Task, run_all
from keras_secondorder.callbacks.event_file import EventFile
from keras_secondorder.callbacks.first_costs import PRODUCTS, FirstCosts
from keras_secondorder.callbacks.looks import Looks
from keras_secondorder.callbacks.records import Records, as_frame
from keras_secondorder.callbacks.step_times import StepTimes, intervals_of
from keras_secondorder.diagnostics import has_blocks
from keras_secondorder.diagnostics.pictures import has_matplotlib
from keras_secondorder.optimizers.base import SecondOrderOptimizer

# How the overhead is shared out.
SHARES = {"step": 0.2, "layers": 0.2, "pictures": 0.2, "network": 0.4}


class CurvatureMonitor(keras.callbacks.Callback):
    """Shows what a second-order optimizer does, and the curvature it works on.

    It writes four groups: "Step" (optimizers of this package), "Layers" (`KFAC`),
    "Network" (any optimizer) and "Text". `docs/reading_the_dials.md` says how to read
    them. It changes nothing about training: the weights are the same, bit for bit.

    Args:
        log_dir: Folder of TensorBoard's logs; the run is its subfolder "curvature".
            None: nothing is written.
        data: `(x, y)` or `(x, y, sample_weight)`, arrays: the fixed batch on which
            the network's curvature is measured. None: the first rows of the arrays that
            `fit` was given, with its weights of examples or classes.
        rows: Most examples of it that are used.
        step_every: Steps between two points of "Step".
        layers_every: Steps between two points of "Layers".
        network_every: Epochs between two measurements of "Network"; 0 for none.
        top: Number of eigenvalues of the Hessian and the Gauss-Newton matrix.
        pictures: Whether to draw factors and the spectral density, where matplotlib is.
        max_overhead: Seconds for each second of training, between 0 and 1, kept by
            spacing out what is expensive; None: no limit, all intervals as given.
        final_look: Whether to look once at the end at whatever there was no time for,
            outside of that limit; it may take as long as a hundred steps.
        training: Whether "Network" has layers in training mode, as they are in a step;
            the errors of the Kronecker approximation always do.
        seed: Seed of random vectors.

    Raises:
        ImportError: `log_dir` is given and tensorboard is not installed.
        ValueError: A number is out of its range, or `data` no such arrays; in `fit`:
            `log_dir` cannot be written to.

    Example:
        >>> import keras, keras_secondorder as kso
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile(optimizer=kso.KFAC(), loss="mse")
        >>> x = keras.random.normal((64, 4), seed=0)
        >>> monitor = kso.callbacks.CurvatureMonitor(step_every=1, max_overhead=None)
        >>> history = model.fit(x, x[:, :1], callbacks=[monitor], verbose=0)
        >>> history.history["Step/damping"] == [monitor.latest()["Step/damping"]]
        True
    """

    def __init__(
        self,
        log_dir=None,
        data=None,
        rows: int = 256,
        step_every: int = 10,
        layers_every: int = 200,
        network_every: int = 1,
        top: int = 5,
        pictures: bool = True,
        max_overhead: float | None = 0.1,
        final_look: bool = False,
        training: bool = False,
        seed: int = 0,
    ):
        super().__init__()
        for name, value, least in (
            ("rows", rows, 2),
            ("step_every", step_every, 1),
            ("layers_every", layers_every, 1),
            ("network_every", network_every, 0),
            ("top", top, 1),
        ):
            check_count(name, value, least)
        if max_overhead is not None:
            check_range("max_overhead", max_overhead, 0, 1)
        if data is not None:
            check_data(data)
        self.folder = None
        if log_dir is not None:
            self.folder = pathlib.Path(log_dir) / "curvature"
            EventFile.check()
        self.data, self.rows = data, rows
        self.step_every, self.layers_every = step_every, layers_every
        self.network_every, self.top = network_every, top
        self.pictures = pictures and has_matplotlib()
        self.max_overhead, self.final_look = max_overhead, final_look
        self.training, self.seed = training, seed
        # Keras may hand the logs of a batch over in another thread, while the next step
        # is being computed: they are only put down there. Everything else is done
        # between two steps.
        self.async_safe = True
        self._records, self._seen = Records(), None
        self._arrived = collections.deque()
        self._work = self._training = 0.0
        self._forget_model()

    # --- what it found ----------------------------------------------------------------

    def frame(self):
        """All numbers so far, a row for each step that has any.

        Returns:
            A pandas frame where pandas is installed, else a dictionary of lists; NaN
            where a step has no value.
        """
        return as_frame(self._records.columns())

    def latest(self) -> dict:
        """The last value of each number, by tag."""
        return self._records.latest()

    # --- Keras's callbacks ------------------------------------------------------------

    def set_model(self, model):
        """Remember the model; `self.model` would bring its variables up to date."""
        super().set_model(model)
        self._watched = model

    def on_train_begin(self, logs=None):
        """Open the file and plan the tasks."""
        model = self.model
        self._optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
        self._second_order = isinstance(self._optimizer, SecondOrderOptimizer)
        self._step = int(ops.convert_to_numpy(self._optimizer.iterations))
        same = self._seen is not None and self._seen() is self._optimizer
        self._records.forget(after=self._step if same else -1)
        self._seen = weakref.ref(self._optimizer)
        self._work, self._training, self._mark, self._compilation = 0.0, 0.0, None, None
        self._ends = [self._step]
        self._arrived.clear()
        self._wanted, self._metrics, self._last_logs = set(), None, (0, None)
        rule = intervals_of(self._optimizer) if self._second_order else {}
        self._times = StepTimes(rule)
        batch = self._fixed_batch()
        self._records.file = EventFile(self.folder) if self.folder else None
        self._looks = Looks(
            model,
            self._optimizer,
            batch,
            self._records,
            self.top,
            self.seed,
            self.pictures,
            self.training,
        )
        self._plan_tasks(network=batch is not None)
        if self._records.file is not None:
            self._looks.texts(self._step, sorted({t.group for t in self._tasks}))
            self._records.file.flush()

    def on_epoch_begin(self, epoch, logs=None):
        """Start counting batches."""
        self._mark, self._before_epoch, self._begun = None, self._step, self._step
        self._times.pause()

    def on_train_batch_begin(self, batch, logs=None):
        """Between two steps: look at what is due."""
        if batch > 0:
            self._stop_clock()
            self._step = self._before_epoch + batch
            self._look()
        self._begun = self._before_epoch + batch + 1
        self._mark = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        """Put the logs down; it may be another thread's turn."""
        step = self._before_epoch + batch + 1
        self._arrived.append((step, time.perf_counter() - self._work, logs))

    def on_test_begin(self, logs=None):
        """Validation inside `fit` is no training time."""
        self._stop_clock()

    def on_epoch_end(self, epoch, logs=None):
        """Look at what is due at the end of an epoch; put the numbers in History."""
        self._stop_clock()
        # Not by the logs, which need not come in order.
        self._step = max(self._step, self._begun)
        if self._arrived:
            self._step = max(self._step, self._arrived[-1][0])
        if self.network_every and (epoch + 1) % self.network_every == 0:
            for task in self._network_tasks:
                task.ask()
        self._look()
        start = time.perf_counter()
        if self._second_order and self._times.seconds:
            shares = {**self._times.shares(), "monitor": self.overhead}
            values = {f"Step/time_share/{part}": s for part, s in shares.items()}
            values["Step/seconds"] = self._times.seconds
            self._records.scalars(self._step, values)
        self._ends.append(self._step)
        self._extend_history()
        if self._records.file is not None:
            self._records.file.flush()
        self._work += time.perf_counter() - start

    def on_train_end(self, logs=None):
        """Close the file, and see, or say, what there was no time for."""
        self._take_logs()  # all have arrived by now
        missing = [task for task in self._tasks if not task.runs]
        if self.final_look and self._step:
            _ = self.model  # on JAX, this brings the variables up to date
            run_all(missing, self._step, time.perf_counter)
            self._extend_history()
            missing = []
        if self._records.file is not None:
            self._records.file.close()
            self._records.file = None
        if missing:
            names = ", ".join(task.name for task in missing)
            warnings.warn(
                f"CurvatureMonitor had no time for: {names}. Received "
                f"max_overhead={self.max_overhead} for {self._training:.0f} s of "
                "training. Raise it, train for longer, or set final_look=True.",
                stacklevel=2,
            )
        self._forget_model()

    def __getstate__(self):
        """For `pickle`, after `fit`; the optimizer of the records stays behind."""
        return {**self.__dict__, "_seen": None}

    @property
    def overhead(self) -> float:
        """Seconds of its own work for each second of training."""
        return self._work / self._training if self._training else 0.0

    def _forget_model(self):
        """Keep nothing alive but the numbers."""
        super().set_model(None)
        self._watched = self._optimizer = self._looks = self._metrics = None
        self._tasks = self._network_tasks = ()
        self._last_logs = 0, None
        self._arrived.clear()

    def _fixed_batch(self):
        """The batch of "Network", or None."""
        if not self.network_every:
            return None
        if self.data is not None:
            batch = first_rows(self.data, self.rows)
        else:
            data, class_weight = arguments_of_fit(self._watched)
            batch = first_rows(data, self.rows, class_weight)
        reason = misfit(self._watched, batch)
        if reason is not None:
            warnings.warn(
                f"CurvatureMonitor shows no group 'Network': {reason}. Pass "
                "`data=(x, y)`, arrays that fit the model, or network_every=0.",
                stacklevel=2,
            )
            return None
        return batch

    # --- when -------------------------------------------------------------------------

    def _stop_clock(self):
        """Add the time since the last batch began to that of training."""
        if self._mark is None:
            return
        seconds = time.perf_counter() - self._mark
        self._mark = None
        if self._compilation is None:
            self._compilation = seconds  # the first step: mostly compilation
        else:
            self._training += seconds

    def _plan_tasks(self, network: bool):
        looks, limit, self._tasks = self._looks, self.max_overhead, []
        whole = Purse(limit)
        purses = {
            name: Purse(None if limit is None else share * limit, whole)
            for name, share in SHARES.items()
        }
        self._first_costs = FirstCosts(self._optimizer)
        blocks = has_blocks(self._optimizer)

        def plan(group, name, look, purse, every=None):
            guess = self._first_costs.of(name, 0.0, 0.0)
            self._tasks.append(Task(group, name, look, purses[purse], guess, every))

        if self._second_order:
            plan("Step", "steps", self._look_at_step, "step", self.step_every)
        if blocks:
            plan("Layers", "layers", looks.layers, "layers", self.layers_every)
            if self.pictures and self._records.file is not None:
                # One layer at a time: pictures are what takes longest.
                every = max(1, self.layers_every // len(self._optimizer.blocks))
                plan("Layers", "pictures", looks.picture, "pictures", every)
        first = len(self._tasks)
        for name in PRODUCTS if network else ():
            if name != "errors" or blocks:
                plan("Network", name, getattr(looks, name), "network")
        self._network_tasks = self._tasks[first:]

    def _look(self):
        """Run the tasks that are due and can be paid for."""
        start = time.perf_counter()
        self._take_logs()
        seconds = self._training / max(self._step - self._ends[0], 1)
        for task in self._tasks:
            if not task.runs:
                first = self._compilation or 0.0
                task.guess(self._first_costs.of(task.name, first, seconds))
        due = [task for task in self._tasks if task.due(self._step, self._training)]
        if due:
            _ = self.model  # on JAX, this brings the variables up to date
            self._work += time.perf_counter() - start
            # The step may still be running, which is training's time and not ours.
            waiting = time.perf_counter()
            ops.convert_to_numpy(self._optimizer.iterations)
            start = time.perf_counter()
            self._training += start - waiting
            # Others may have paid since.
            still = (task for task in due if task.due(self._step, self._training))
            run_all(still, self._step, time.perf_counter)
            self._take_logs()
        self._work += time.perf_counter() - start

    def _look_at_step(self, step: int):
        if self._metrics is None:  # here, where the metrics have their values
            self._metrics = self._watched.get_metrics_result()
        self._looks.step(step)
        arrived, logs = self._last_logs
        if arrived == step:
            self._keep_logs(step, logs)
        else:
            self._wanted.add(step)

    def _take_logs(self):
        """Take what arrived since the last look."""
        arrived = [self._arrived.popleft() for _ in range(len(self._arrived))]
        # On JAX they come from several threads, not always in the order of the steps.
        for step, moment, logs in sorted(arrived, key=lambda entry: entry[0]):
            self._times.finished(step - 1, moment)
            if step > self._last_logs[0]:
                self._last_logs = step, logs
            if step in self._wanted:
                self._keep_logs(step, logs)

    def _keep_logs(self, step, logs):
        self._wanted.discard(step)
        own = [name for name in logs if name not in self._metrics]
        values = {f"Step/{name}": logs[name] for name in own}
        if "Step/learning_rate" not in values:
            rate = ops.convert_to_numpy(self._optimizer.learning_rate)
            values["Step/learning_rate"] = rate
        self._records.scalars(step, values)

    def _extend_history(self):
        """Put each epoch's last values there; NaN for what was not looked at in it."""
        history = self._watched.history
        if not isinstance(history, keras.callbacks.History):
            return
        epochs = len(self._ends) - 1
        # The one before too: on JAX, its last logs may have come since.
        for i in range(max(0, epochs - 2), epochs):
            found = self._records.latest(self._ends[i], self._ends[i + 1])
            for tag in sorted({*found, *self._records.latest()}):
                values = history.history.setdefault(tag, [])
                values += [float("nan")] * (i + 1 - len(values))
                values[i] = found.get(tag, values[i])
