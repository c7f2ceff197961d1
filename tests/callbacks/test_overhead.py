"""How the monitor keeps to its budget, and tells the parts of a step, without fit."""

import keras
import numpy as np
import pytest

import keras_secondorder as kso
from keras_secondorder.callbacks.budget import Purse, Task, run_all
from keras_secondorder.callbacks.event_file import EventFile
from keras_secondorder.callbacks.first_costs import FirstCosts
from keras_secondorder.callbacks.records import Records
from keras_secondorder.callbacks.step_times import StepTimes, intervals_of


class Clock:
    """Seconds that pass when a task says so."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def simulate(
    costs, share, steps=10_000, step_seconds=0.01, every=10, first=0.0, whole=None
):
    """`(spent by each task, training seconds)` of a training run.

    The first run of each task costs `first` more, which is its guess.
    """
    clock, purse, spent = Clock(), Purse(share, whole), [0.0] * len(costs)

    def work(i):
        def run(step):
            cost = costs[i] + (0.0 if spent[i] else first)
            clock.now += cost
            spent[i] += cost

        return run

    tasks = [
        Task("group", str(i), work(i), purse, first, every) for i in range(len(costs))
    ]
    for step in range(1, steps + 1):
        for task in tasks:
            if task.due(step, step * step_seconds):
                task.run(step, clock)
    return spent, steps * step_seconds


def test_expensive_tasks_are_spaced_out():
    (spent,), training = simulate([0.5], share=0.1)
    # It is used, to within a run; and never overdrawn by more than the first one.
    assert 0.1 * training - 0.5 <= spent <= 0.1 * training
    spent, training = simulate([0.5, 0.05], share=0.1)
    assert sum(spent) <= 0.1 * training
    assert min(spent) > 0


def test_cheap_tasks_keep_their_interval():
    (spent,), _ = simulate([1e-4], share=0.1)
    assert spent == pytest.approx(1000 * 1e-4)
    (spent,), _ = simulate([0.5], share=None, steps=100)
    assert spent == pytest.approx(10 * 0.5)


def test_a_first_run_waits_until_its_guess_is_paid_for():
    task = Task("group", "name", lambda step: None, Purse(0.1), guess=2.0)
    assert not task.due(1, training=19.0)
    assert task.due(1, training=21.0)
    task.guess(3.0)
    assert not task.due(1, training=21.0)
    task.run(1, Clock())
    assert not task.due(2, training=1e9)  # only when it is asked for
    task.ask()
    assert task.due(2, training=21.0)


def test_a_first_run_is_paid_from_the_whole_and_keeps_to_it():
    """It costs 2 s of 10% for all: after 20 s, where its own 2% would take 100 s."""
    for training, ran in ((19.0, False), (30.0, True)):
        whole = Purse(0.1)
        (spent,), _ = simulate(
            [0.01], share=0.02, steps=int(100 * training), first=2.0, whole=whole
        )
        assert (spent > 0) == ran
        assert whole.spent == pytest.approx(spent) and spent <= 0.1 * training
    # What comes after is spaced by its own share.
    later = Purse(0.02, Purse(0.1))
    later.pay(2.0, first=True)
    assert later.allows(0.5, 30.0) and not later.allows(0.7, 30.0)


def test_first_looks_are_guessed_to_compile():
    model = keras.Sequential([keras.Input((30,)), keras.layers.Dense(20)])
    model.compile(optimizer=kso.KFAC(), loss="mse")
    costs = FirstCosts(model.optimizer)
    assert costs.of("hessian", 4.0, 0.01) > 8.0
    # A and G have a shape each.
    least = {"jax": 0.3, "tensorflow": 0.04, "torch": 0.0}[keras.config.backend()]
    assert costs.of("layers", 0.0, 0.01) >= least
    assert costs.of("layers", 0.0, 0.01) < least + 0.1


def test_what_fails_for_the_same_reason_is_one_warning():
    def fail(step):
        raise TypeError("no such thing")

    tasks = [Task("Network", n, fail, Purse(None), 0.0) for n in ("a", "b")]
    with pytest.warns(UserWarning, match="leaves out 'a', 'b' from step 3 on.*no suc"):
        run_all(tasks, 3, Clock())
    assert not tasks[0].due(4, 1.0)


def test_parts_of_a_step_are_found_from_their_intervals():
    """Seconds with noise of 2%, of which the parts are 10 ms, 4 ms and 30 ms."""
    times = StepTimes({"statistics": (2, 0), "inverses": (20, 0), "always": (1, 0)})
    rng, now = np.random.default_rng(0), 0.0
    for k in range(400):
        seconds = 0.010 + 0.004 * (k % 2 == 0) + 0.030 * (k % 20 == 0)
        now += seconds * rng.uniform(0.98, 1.02)
        if k == 200:
            now += 3.0  # the machine did something else
        times.finished(k, now)
    total = 0.010 + 0.004 / 2 + 0.030 / 20
    shares = times.shares()
    assert shares == pytest.approx(
        {
            "rest": 0.010 / total,
            "statistics": 0.002 / total,
            "inverses": 0.0015 / total,
        },
        abs=0.02,
    )
    assert sum(shares.values()) == pytest.approx(1.0)
    assert times.seconds == pytest.approx(0.012, rel=0.2)


def test_pauses_and_groups_of_steps():
    """Validation between two steps is no step; an execution may have eight of them."""
    times = StepTimes({"part": (4, 0)})
    now = 0.0
    for i in range(100):
        times.finished(8 * i + 7, now := now + 0.8)
        if i % 10 == 9:
            times.pause()
            now += 100.0
    assert times.seconds == pytest.approx(0.1)


def test_intervals_of_kfac():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    optimizer = kso.KFAC(statistics_every=3, inverse_every=7, damping=0.1)
    model.compile(optimizer=optimizer, loss="mse")
    assert intervals_of(optimizer) == {"statistics": (3, 0), "inverses": (7, 0)}
    model.compile(optimizer=kso.HessianFree(), loss="mse")
    assert intervals_of(model.optimizer) == {}


def test_nothing_that_is_not_finite_is_kept(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    file = EventFile(tmp_path)
    records = Records(file)
    records.scalars(3, {"Step/a": np.nan, "Step/b": np.inf, "Step/rho": 1.5})
    file.histogram("h", 3, [1.0, np.nan, 2.0])
    file.close()
    assert records.columns() == {"step": [3], "Step/rho": [1.5]}
    records.file = None
    records.scalars(4, {"Step/rho": 2.5})
    records.forget(after=3)
    assert records.latest() == {"Step/rho": 1.5}
    reader = EventAccumulator(str(tmp_path))
    reader.Reload()
    assert {*reader.Tags()["tensors"]} == {"Step/rho", "h"}
    assert "quadratic model" in reader.SummaryMetadata("Step/rho").summary_description
    (point,) = reader.Tensors("h")
    assert np.frombuffer(point.tensor_proto.tensor_content)[2::3].sum() == 2
