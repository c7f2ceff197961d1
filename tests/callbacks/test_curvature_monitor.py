"""The curvature monitor in `fit`: what it writes, and that it disturbs nothing."""

import pickle
import sys
import warnings

import keras
import numpy as np
import pytest
from training.loop import (
    assert_equal,
    classifier,
    compiled,
    crossentropy,
    examples,
    fit,
    restore,
    state,
)

import keras_secondorder as kso
from keras_secondorder.callbacks import curvature_monitor
from keras_secondorder.callbacks.batch import first_rows

CurvatureMonitor = kso.callbacks.CurvatureMonitor
STEP = {
    *("damping", "gamma", "learning_rate", "momentum", "rho", "predicted_change"),
    *("actual_change", "quadratic_form", "update_norm", "gradient_norm"),
    *("update_gradient_cosine", "successive_cosine", "skipped_steps"),
    *("skipped_for_loss", "skipped_for_gradient", "skipped_for_step"),
    *("skipped_for_empty_batch", "failed_inverses", "seconds", "time_share/monitor"),
}
TIMED = {f"time_share/{p}" for p in ("rest", "statistics", "inverses")}
TIMED |= {"time_share/reduction_ratio"}
FACTOR = {
    *("condition", "trace", "effective_rank", "largest", "smallest"),
    "damping_share",
}
LAYERS = {
    f"Layers/{layer}/{name}"
    for layer in ("hidden", "logits")
    for name in ("pi", "gain", *(f"{f}_{n}" for f in "AG" for n in FACTOR))
}
NETWORK = {
    *(f"hessian_eigenvalue_{i}" for i in (1, 2, 3)),
    *(f"gauss_newton_eigenvalue_{i}" for i in (1, 2, 3)),
    *("hessian_trace", "gauss_newton_trace", "gradient_in_top_subspace"),
    *("gradient_square", "gradient_variance"),
}
ERRORS = {f"kronecker_error_{d}" for d in ("update", "gradient", "random")}
X, Y = examples(96)
EPOCHS = 5  # of 12 steps


def group(name, tags):
    return {f"{name}/{tag}" for tag in tags}


class Run:
    """A fit without the monitor, and the same one with it."""

    def __init__(self, optimizer, folder, **options):
        self.model = compiled(classifier(), optimizer, metrics=["accuracy"])
        if not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        initial = state(self.model)
        self.plain = fit(self.model, X, Y, epochs=EPOCHS)
        self.expected = state(self.model)
        restore(self.model, initial)
        self.steps = 0
        if isinstance(optimizer, kso.KFAC):  # counts traces, or steps on torch
            step = optimizer.step

            def counted(objective):
                self.steps += 1
                return step(objective)

            optimizer.__dict__["step"] = counted
        self.monitor = CurvatureMonitor(
            folder, step_every=3, layers_every=20, top=3, max_overhead=None, **options
        )
        self.history = fit(self.model, X, Y, epochs=EPOCHS, callbacks=[self.monitor])
        self.after = state(self.model)
        self.folder = folder


@pytest.fixture(scope="module")
def kfac(tmp_path_factory):
    optimizer = kso.KFAC(damping=kso.AdaptiveDamping(0.01, 10, gamma_every=None))
    return Run(optimizer, tmp_path_factory.mktemp("kfac"), network_every=3)


@pytest.fixture(scope="module")
def adam(tmp_path_factory):
    optimizer = keras.optimizers.Adam()
    return Run(optimizer, tmp_path_factory.mktemp("adam"), network_every=EPOCHS)


def events(folder):
    """Tensors by tag and kind, read back with tensorboard's own reader."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(
        str(folder / "curvature"), size_guidance={"tensors": 0, "images": 0}
    )
    reader.Reload()
    found = {}
    for tag in reader.Tags()["tensors"]:
        metadata = reader.SummaryMetadata(tag)
        kind = metadata.plugin_data.plugin_name
        found.setdefault(kind, {})[tag] = reader.Tensors(tag)
        assert kind == "text" or metadata.summary_description, tag
    return found


def test_training_is_not_disturbed(kfac, adam):
    for run in (kfac, adam):
        assert_equal(run.after, run.expected)
        for name, values in run.plain.items():
            np.testing.assert_array_equal(run.history[name], values)


def test_no_wrappers_are_left_and_nothing_is_traced_again(kfac):
    assert all("call" not in vars(layer) for layer in kfac.model.layers)
    # Keras has its training function from the fit before.
    steps = EPOCHS * 12 if keras.config.backend() == "torch" else 0
    assert kfac.steps == steps


def test_scalars_of_kfac(kfac):
    expected = group("Step", STEP | TIMED) | LAYERS | group("Network", NETWORK | ERRORS)
    frame = kfac.monitor.frame()
    assert expected <= {*frame} <= {*expected, "step", "Network/noise_scale"}
    assert expected <= {*kfac.history}
    written = events(kfac.folder)["scalars"]
    assert {*written} == {*frame} - {"step"}
    for tag, points in written.items():
        values = [float(p.tensor_proto.float_val[0]) for p in points]
        kept = [
            (s, v) for s, v in zip(frame["step"], frame[tag], strict=True) if v == v
        ]
        assert [p.step for p in points] == [s for s, _ in kept]
        np.testing.assert_allclose(values, [v for _, v in kept], rtol=1e-6)
        assert np.isfinite(values).all()


def test_logs_are_those_of_their_step(kfac):
    """rho and the changes belong together; the norms follow from the weights."""
    frame = kfac.monitor.frame()
    rows = [
        dict(zip(frame, row, strict=True)) for row in zip(*frame.values(), strict=True)
    ]
    rows = [row for row in rows if row["Step/rho"] == row["Step/rho"]]
    assert len(rows) >= EPOCHS * 3
    for row in rows:
        # Under momentum the model may predict an increase; see `reduction_ratio`.
        predicted = min(row["Step/predicted_change"], -1e-30)
        ratio = row["Step/actual_change"] / predicted
        assert row["Step/rho"] == pytest.approx(np.clip(ratio, -10, 10), rel=1e-3)
        assert row["Step/gamma"] == pytest.approx(row["Step/damping"] ** 0.5, rel=1e-5)
        assert -1 <= row["Step/update_gradient_cosine"] <= 1


def test_history_has_the_last_values_of_each_epoch(kfac):
    assert kfac.history["Step/damping"][-1] == kfac.monitor.latest()["Step/damping"]
    for tag, values in kfac.history.items():
        assert len(values) == EPOCHS, tag
    frame = kfac.monitor.frame()
    steps, traces = np.array(frame["step"]), np.array(frame["Network/hessian_trace"])
    for epoch, value in enumerate(kfac.history["Network/hessian_trace"]):
        inside = (steps > 12 * epoch) & (steps <= 12 * (epoch + 1))
        measured = traces[inside & np.isfinite(traces)]
        # NaN, and no repetition, where it was not measured.
        np.testing.assert_equal(value, measured[-1] if measured.size else np.nan)


def test_a_final_look_at_what_there_was_no_time_for():
    options = {"max_overhead": 1e-9, "pictures": False}
    found = {}
    for final in (False, True):
        model = compiled(classifier(), kso.KFAC())
        monitor = CurvatureMonitor(final_look=final, **options)
        if final:
            history = fit(model, X, Y, epochs=2, callbacks=[monitor])
        else:
            with pytest.warns(UserWarning, match="no time for.*or set final_look=True"):
                fit(model, X, Y, epochs=2, callbacks=[monitor])
        found[final] = {*monitor.latest()}
    expected = group("Network", NETWORK | ERRORS)
    assert not found[False] & expected
    assert expected <= found[True]
    values = history["Network/hessian_trace"]
    assert np.isnan(values[0]) and np.isfinite(values[1])


def test_pictures_histograms_and_texts(kfac):
    from PIL import Image

    found = events(kfac.folder)
    pictures = {f"Layers/{n}/factors" for n in ("hidden", "logits")}
    assert {*found["images"]} == pictures | {"Network/density"}
    for points in found["images"].values():
        import io

        width, height, png = points[0].tensor_proto.string_val
        assert Image.open(io.BytesIO(png)).size == (int(width), int(height))
    assert {*found["histograms"]} == {
        f"Layers/{n}/{f}_spectrum" for n in ("hidden", "logits") for f in "AG"
    }
    texts = {
        tag: points[0].tensor_proto.string_val[0].decode()
        for tag, points in found["text"].items()
    }
    cards = {f"{g}/how_to_read" for g in ("Step", "Layers", "Network")}
    assert {*texts} == cards | {"Text/coverage", "Text/memory_plan"}
    assert "A 7 x 7, G 4 x 4" in texts["Text/coverage"]
    assert "bytes" in texts["Text/memory_plan"]


def test_first_order_optimizers_have_the_network_alone(adam):
    found = events(adam.folder)
    assert {*found["scalars"]} - {"Network/noise_scale"} == group("Network", NETWORK)
    assert {*found["images"]} == {"Network/density"}
    cards = {"Network/how_to_read", "Text/coverage", "Text/memory_plan"}
    assert {*found["text"]} == cards


def test_numbers_of_the_network_are_those_of_the_final_weights(adam):
    assert adam.monitor.frame()["step"][-1] == EPOCHS * 12
    G = kso.curvature.gauss_newton(adam.model, X, Y)
    top = adam.history["Network/gauss_newton_eigenvalue_1"][-1]
    values = np.linalg.eigvalsh(keras.ops.convert_to_numpy(G.to_dense()))
    assert top == pytest.approx(values[-1], rel=1e-3)


def test_resuming_goes_on_at_the_step(kfac):
    """And a NaN batch is counted by its cause."""
    bad = X.copy()
    bad[:8] = np.nan
    monitor = CurvatureMonitor(step_every=1, network_every=0, max_overhead=None)
    before = int(kfac.model.optimizer.iterations)
    fit(kfac.model, bad, Y, epochs=1, callbacks=[monitor])
    frame = monitor.frame()
    assert frame["step"][0] == before + 1
    assert monitor.latest()["Step/skipped_for_gradient"] == 0
    assert monitor.latest()["Step/skipped_for_loss"] == 1
    assert monitor.latest()["Step/skipped_steps"] == 1
    values = np.array([v for k, v in frame.items() if k != "step"], float)
    assert not np.isinf(values).any()


def test_data_sets_are_left_alone(kfac):
    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 2

        def __getitem__(self, i):
            return X[8 * i : 8 * i + 8], Y[8 * i : 8 * i + 8]

    monitor = CurvatureMonitor(max_overhead=None, layers_every=1)
    with pytest.warns(UserWarning, match=r"no group 'Network'.*`data=\(x, y\)`"):
        fit(kfac.model, Batches(), None, batch_size=None, callbacks=[monitor])
    assert not any(tag.startswith("Network/") for tag in monitor.latest())
    assert "Layers/hidden/pi" in monitor.latest()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (X, r"must be `\(x, y\)`.*Received a ndarray"),
        ({"x": X, "y": Y}, "Received a dict"),
        ((X,), "Received a tuple of 1"),
        ((X, Y[:-1]), "as many rows as each other. Received 96, 95"),
        ((X, "labels"), "Received ndarray, str"),
    ],
)
def test_data_of_another_structure_are_refused(data, message):
    with pytest.raises(ValueError, match=message):
        CurvatureMonitor(data=data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((X[:, :5], Y), r"inputs of shape \(96, 5\) do not fit .*6"),
        ((X, None), "no targets"),
    ],
)
def test_data_that_do_not_fit_the_model_are_one_warning(adam, data, message):
    monitor = CurvatureMonitor(data=data, max_overhead=None, top=3)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        fit(adam.model, X, Y, callbacks=[monitor])
    ours = [str(w.message) for w in found if "CurvatureMonitor" in str(w.message)]
    assert len(ours) == 1 and "no group 'Network'" in ours[0]
    with pytest.warns(UserWarning, match=message):
        warnings.warn(ours[0], stacklevel=1)
    assert monitor.latest() == {}


def test_class_weights_are_weights_of_the_fixed_batch(adam, monkeypatch):
    """As Keras has them: a class that is not named weighs 1."""
    expected = np.array([0.5, 1.0, 3.0])[Y[:40]]
    for y in (np.eye(3)[Y], Y[:, None]):
        *_, found = first_rows((X, y), 40, {0: 0.5, 2: 3.0})
        np.testing.assert_array_equal(found, expected)
    looks = []
    monkeypatch.setattr(curvature_monitor, "Looks", lambda *a: looks.append(a))
    monkeypatch.setattr(CurvatureMonitor, "_plan_tasks", lambda self, network: None)
    monitor = CurvatureMonitor(rows=40, max_overhead=None)
    fit(adam.model, X, Y, class_weight={0: 0.5, 2: 3.0}, callbacks=[monitor])
    np.testing.assert_array_equal(looks[0][2][2], expected)


def test_what_there_was_no_time_for_is_named(kfac):
    monitor = CurvatureMonitor(max_overhead=1e-6)
    with pytest.warns(UserWarning, match="no time for: layers, .*max_overhead"):
        fit(kfac.model, X, Y, callbacks=[monitor])


def test_frame_with_pandas(kfac, monkeypatch):
    """With a stand-in for pandas, which the tests do not require."""

    class Frame(dict):
        def set_index(self, name):
            return self.pop(name), self

    stand_in = type(sys)("pandas")
    stand_in.DataFrame = Frame
    monkeypatch.setitem(sys.modules, "pandas", stand_in)
    steps, frame = kfac.monitor.frame()
    assert len(steps) == len(frame["Step/damping"])


def test_a_folder_that_cannot_be_written_to_is_refused(adam, tmp_path):
    pytest.importorskip("tensorboard")
    (tmp_path / "file").touch()
    monitor = CurvatureMonitor(tmp_path / "file", network_every=0)
    with pytest.raises(ValueError, match="`log_dir` must be a folder that can be wr"):
        fit(adam.model, X, Y, callbacks=[monitor])


def test_without_tensorboard(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ImportError, match="pip install tensorboard"):
        CurvatureMonitor(tmp_path)
    CurvatureMonitor()


@pytest.mark.parametrize(
    ("name", "value"),
    [("rows", 1), ("step_every", 0), ("top", 0), ("network_every", -1), ("rows", "2")],
)
def test_numbers_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match=f"`{name}` must be an integer of at least"):
        CurvatureMonitor(**{name: value})
    with pytest.raises(ValueError, match="`max_overhead` must be above 0"):
        CurvatureMonitor(max_overhead=0)


def test_krylov_methods_show_their_solver():
    model = compiled(classifier(), kso.HessianFree(cg_iterations=3), crossentropy())
    monitor = CurvatureMonitor(step_every=1, network_every=0, max_overhead=None)
    fit(model, X, Y, batch_size=48, callbacks=[monitor])
    found = monitor.latest()
    expected = {"cg_iterations", "cg_residual", "rho", "step_length", "quadratic_form"}
    assert group("Step", expected) <= {*found}
    ratio = found["Step/actual_change"] / found["Step/predicted_change"]
    assert found["Step/rho"] == pytest.approx(ratio, rel=1e-4)
    assert found["Step/quadratic_form"] > 0


def test_what_cannot_be_measured_is_a_warning():
    """A batch with a NaN: training skips it, and goes on without the measurement."""
    x = np.random.default_rng(0).normal(size=(16, 3)).astype("float32")
    x[3] = np.nan
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(optimizer=kso.KFAC(), loss="mse")
    monitor = kso.callbacks.CurvatureMonitor(max_overhead=None, network_every=1)
    with pytest.warns(UserWarning, match="leaves out '.*' from step .*failed"):
        model.fit(x, x[:, :1], batch_size=8, verbose=0, callbacks=[monitor])
    assert int(model.optimizer.iterations) >= 1


def test_tonga_has_an_argument_named_blocks():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(optimizer=kso.TONGA(), loss="mse")
    x = np.random.default_rng(0).normal(size=(16, 3)).astype("float32")
    monitor = kso.callbacks.CurvatureMonitor(max_overhead=None)
    model.fit(x, x[:, :1], batch_size=8, verbose=0, callbacks=[monitor])
    assert not any(tag.startswith("Layers/") for tag in monitor.latest())
    # It keeps the numbers, and neither the model nor what looked at it.
    assert "Step/damping" in monitor.latest() and monitor.model is None
    assert pickle.loads(pickle.dumps(monitor)).latest() == monitor.latest()
    # Another optimizer starts at step 0 again: its records are its own.
    model.compile(optimizer="sgd", loss="mse")
    monitor.network_every = 0
    history = model.fit(x, x[:, :1], verbose=0, callbacks=[monitor]).history
    assert monitor.latest() == {} and {*history} == {"loss"}
