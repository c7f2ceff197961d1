"""The many ways into a training step, which all take the same steps."""

import keras
import numpy as np
import pytest
from training.loop import (
    BACKEND,
    arrays,
    assert_close,
    assert_equal,
    classifier,
    compiled,
    examples,
    fit,
    moved,
    restore,
    state,
)

import keras_secondorder as kso

# Two compilers add the same float32 numbers in another order; over some steps.
COMPILER_RTOL = 1e-4
# Two epochs of the batches 8, 8, 8 and 3: the last is short.
ROWS = 27


@pytest.fixture(scope="module")
def model():
    """A trained model, whose compiled step the tests below share."""
    model = compiled(classifier(), metrics=["accuracy"])
    model.initial = state(model)
    fit(model, *examples(ROWS), epochs=2)
    model.final = state(model)
    return model


def count_traces(monkeypatch):
    traces = []
    step = kso.KFAC.step

    def counted(self, objective):
        traces.append(1)
        return step(self, objective)

    monkeypatch.setattr(kso.KFAC, "step", counted)
    return traces


def scheduled():
    rate = keras.optimizers.schedules.ExponentialDecay(0.3, 2, 0.9)
    return kso.KFAC(rate, norm_constraint=None, relative_step=None)


def test_r21_traces(monkeypatch):
    traces = count_traces(monkeypatch)
    x, y = examples(8 * 10 + 3)
    finals = []
    for steps in (1, 8):
        if steps > 1 and BACKEND == "torch":
            continue  # Keras refuses steps_per_execution there
        traces.clear()
        model = compiled(classifier(), scheduled(), steps_per_execution=steps)
        history = fit(model, x, y, epochs=3)
        finals.append(arrays(model.weights))
        assert history["learning_rate"][-1] < history["learning_rate"][0]
        assert int(model.optimizer.iterations) == 33
        if BACKEND != "torch":  # which runs each step in Python
            assert len(traces) <= 2
    assert_close(finals[-1], finals[0], COMPILER_RTOL)


# "auto" is what all other tests run with.
HOW = [{"jit_compile": False}, {"run_eagerly": True}]
if BACKEND != "torch":
    HOW.append({"jit_compile": True})


@pytest.fixture(scope="module")
def one_step():
    # Sampled targets would differ: TensorFlow draws other numbers inside XLA.
    x, y = examples(8)
    model = compiled(classifier(), kso.KFAC(fisher="exact"))
    before = arrays(model.weights)
    fit(model, x, y)
    after = arrays(model.weights)
    assert all(moved(after, before))
    return after


@pytest.mark.parametrize("how", HOW, ids=str)
def test_ways_to_compile_take_the_same_step(how, one_step):
    model = compiled(classifier(), kso.KFAC(fisher="exact"), **how)
    fit(model, *examples(8))
    assert_close(arrays(model.weights), one_step, COMPILER_RTOL)


def py_dataset(x, y):
    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return -(-len(x) // 8)

        def __getitem__(self, i):
            return x[8 * i : 8 * i + 8], y[8 * i : 8 * i + 8]

    return {"x": Batches()}


def generator(x, y):
    def batches():
        while True:
            for i in range(0, len(x), 8):
                yield x[i : i + 8], y[i : i + 8]

    return {"x": batches(), "steps_per_epoch": -(-len(x) // 8)}


def tf_data(x, y):
    tf = pytest.importorskip("tensorflow")
    return {"x": tf.data.Dataset.from_tensor_slices((x, y)).batch(8)}


def torch_loader(x, y):
    torch = pytest.importorskip("torch")
    data = torch.utils.data.TensorDataset(torch.tensor(x), torch.tensor(y))
    return {"x": torch.utils.data.DataLoader(data, batch_size=8)}


@pytest.mark.parametrize("source", [py_dataset, generator, tf_data, torch_loader])
def test_sources_of_data_give_the_same_steps(source, model):
    restore(model, model.initial)
    model.fit(**source(*examples(ROWS)), epochs=2, shuffle=False, verbose=0)
    # The generator's element types may be compiled anew.
    assert_close(state(model)[:4], model.final[:4], COMPILER_RTOL)
    assert int(model.optimizer.iterations) == 8


def test_same_seed_same_weights(model):
    restore(model, model.initial)
    fit(model, *examples(ROWS), epochs=2)
    assert_equal(state(model), model.final)
    again = compiled(classifier(), metrics=["accuracy"])
    fit(again, *examples(ROWS), epochs=2)
    assert_equal(state(again), model.final)


def test_train_on_batch_is_a_step_of_fit(model):
    x, y = examples(ROWS)
    restore(model, model.initial)
    fit(model, x[:8], y[:8])
    expected = state(model)
    restore(model, model.initial)
    logs = model.train_on_batch(x[:8], y[:8], return_dict=True)
    assert_close(state(model)[:4], expected[:4], COMPILER_RTOL)
    assert {"loss", "accuracy", "damping", "skipped_steps"} <= set(logs)
    assert logs["damping"] == pytest.approx(0.2)


def test_validation_evaluate_and_predict(model):
    x, y = examples(ROWS)
    restore(model, model.initial)
    history = fit(model, x, y, epochs=2, validation_data=(x[:16], y[:16]))
    assert_equal(state(model), model.final)
    loss, accuracy = model.evaluate(x[:16], y[:16], batch_size=8, verbose=0)
    assert history["val_loss"][-1] == pytest.approx(loss, rel=1e-5)
    assert history["val_accuracy"][-1] == pytest.approx(accuracy, rel=1e-5)
    logits = model.predict(x[:16], verbose=0)
    assert accuracy == pytest.approx(np.mean(np.argmax(logits, 1) == y[:16]))
    assert_equal(state(model), model.final)


def test_first_loss_is_the_loss_before_the_step(model):
    x, y = examples(8)
    restore(model, model.initial)
    before = model.evaluate(x, y, batch_size=8, verbose=0)
    history = fit(model, x, y)
    assert history["loss"][0] == pytest.approx(before[0], rel=1e-5)
    assert history["accuracy"][0] == pytest.approx(before[1])


def test_r19_zero_weights_are_as_if_the_rows_were_not_there():
    """The loss is a sum, so rows that are left out change no other's share."""
    x, y = examples(16)
    weight = np.tile([1.0, 0.0], 8).astype("float32")
    x[1::2] *= 5.0  # what has no weight must not be seen
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    model = compiled(classifier(), kso.KFAC(fisher="exact"), loss=loss)
    initial = state(model)
    settings = {"batch_size": 16, "epochs": 3}
    fit(model, x, y, sample_weight=weight, **settings)
    weighted = arrays(model.weights)
    restore(model, initial)
    fit(model, x[::2], y[::2], **settings)
    left_out = arrays(model.weights)
    assert_close(weighted, left_out, COMPILER_RTOL)
    restore(model, initial)
    fit(model, x, y, **settings)
    differences = zip(arrays(model.weights), weighted, strict=True)
    assert any(abs(a - w).max() > 0.01 for a, w in differences)


def test_r19_class_weight_reaches_the_curvature():
    x, y = examples(16)
    model = compiled(classifier(), kso.KFAC(fisher="exact"))
    initial = state(model)
    seen = []
    for weights in (
        {"class_weight": {0: 0.0, 1: 1.0, 2: 3.0}},
        {"sample_weight": np.array([0.0, 1.0, 3.0], "float32")[y]},
        {"sample_weight": np.ones(16, "float32")},
    ):
        restore(model, initial)
        fit(model, x, y, batch_size=16, **weights)
        factors = [f for b in model.optimizer.blocks for f in b.factors]
        seen.append((arrays(factors), arrays(model.weights)))
    assert_equal(seen[0][0], seen[1][0])
    assert_equal(seen[0][1], seen[1][1])
    for by_class, plain in zip(seen[0][0], seen[2][0], strict=True):
        assert abs(by_class - plain).max() > 0.01 * abs(plain).max()


@pytest.mark.skipif(BACKEND == "jax", reason="JAX knows each shape, and compiles it")
def test_an_empty_batch_is_skipped_whatever_is_known_of_its_shape():
    """After another length, TensorFlow traces one step for all of them."""
    x, y = examples(16)
    model = compiled(classifier(), metrics=[])
    for rows in (8, 16):
        model.train_on_batch(x[:rows], y[:rows])
    before = arrays(model.trainable_variables)
    for count in (1, 2):
        logs = model.train_on_batch(x[:0], y[:0], return_dict=True)
        assert np.isnan(logs["loss"])
        assert logs["skipped_steps"] == count
    assert_equal(arrays(model.trainable_variables), before)
    model.train_on_batch(x, y)
    assert all(moved(arrays(model.trainable_variables), before))
