"""The classic optimizers keep what every optimizer promises."""

import keras
import numpy as np
import problems
import pytest
from keras import ops

import keras_secondorder as kso
from keras_secondorder.testing import check_optimizer
from keras_secondorder.testing.optimizer import check_config, check_resume

# The steps on the quadratic and in the valley, and the share of the loss to reach. A
# fifth is the floor of the valley, along which most of these are slow; and gradients
# whose covariance is large, as at the start of the quadratic, make TONGA slow.
OPTIMIZERS = {
    "newton": (kso.Newton, 30, 30, 0.1),
    "levenberg-marquardt": (kso.LevenbergMarquardt, 30, 30, 0.1),
    "tonga": (lambda: kso.TONGA(interval=2, columns=8), 250, 60, 0.2),
    "diagonal": (lambda: kso.DiagonalGaussNewton(0.5), 60, 60, 0.2),
    "meta-descent": (lambda: kso.StochasticMetaDescent(1.0, 0.005, 0.001), 60, 60, 0.2),
    "matrix momentum": (kso.MatrixMomentum, 60, 60, 0.1),
    "sgd-qn": (lambda: kso.SGDQN(damping=2.0, interval=2), 60, 60, 0.2),
    "rprop": (lambda: kso.RProp(initial_step=0.1), 60, 60, 0.2),
    "rates": (
        lambda: kso.AdaptiveRates(1.0, "sign", 5e-4, up=1.1, down=0.5),
        60,
        60,
        0.2,
    ),
    "normalized": (lambda: kso.AdaptiveRates(1.0, "normalized", 1e-3), 60, 60, 0.2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_every_optimizer_promises(name):
    make, *numbers = OPTIMIZERS[name]
    if keras.config.backend() == "torch":  # which compiles nothing
        check_optimizer(make, *numbers)
    else:
        check_config(make)
        check_resume(make)


def classifier(normalized):
    """A classifier, or one with moving statistics."""
    if not normalized:
        return problems.classifier()
    normalization = keras.layers.BatchNormalization(momentum=0.5)
    return problems.sequential([normalization, problems.dense(problems.CLASSES)])


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize(
    "name", ["levenberg-marquardt", "tonga", "sgd-qn", "rprop", "rates", "normalized"]
)
def test_r4_a_batch_of_nan_changes_nothing(name, normalized):
    model = classifier(normalized)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=OPTIMIZERS[name][0](), loss=loss)
    data = problems.classification(24)
    model.train_on_batch(data.x, data.classes)
    bad = data.x.copy()
    bad[3, 0] = np.nan
    kept = [v for v in model.optimizer.variables if "skips" not in v.path]
    before = [np.array(ops.convert_to_numpy(v)) for v in [*model.weights, *kept]]
    model.train_on_batch(bad, data.classes)
    for old, v in zip(before, [*model.weights, *kept], strict=True):
        np.testing.assert_array_equal(old, ops.convert_to_numpy(v))
    assert int(ops.convert_to_numpy(model.optimizer.skipped_steps)) == 1


class OwnTrainStep(keras.Sequential):
    def train_step(self, *args, **kwargs):
        return super().train_step(*args, **kwargs)


@pytest.mark.parametrize("name", ["rprop", "rates", "normalized"])
def test_optimizers_of_the_gradient_alone_work_in_any_training_loop(name):
    data = problems.classification(24)
    weights = []
    for kind in (keras.Sequential, OwnTrainStep):
        model = kind([keras.Input((problems.FEATURES,)), problems.dense(2)])
        model.set_weights([np.full(v.shape, 0.1) for v in model.weights])
        model.compile(optimizer=OPTIMIZERS[name][0](), loss="mse")
        for _ in range(4):
            model.train_on_batch(data.x, data.x[:, :2])
        assert ("train_step" in vars(model)) == (kind is keras.Sequential)
        weights.append(np.concatenate([w.ravel() for w in model.get_weights()]))
    np.testing.assert_allclose(*weights, rtol=1e-5)
    optimizer, variables = model.optimizer, model.trainable_variables
    before = [np.array(ops.convert_to_numpy(v)) for v in optimizer.variables]
    for bad in (True, False):
        gradients = [ops.ones(v.shape) for v in variables]
        if bad:
            gradients[0] = gradients[0] * float("nan")
        optimizer.apply(gradients, variables)
        now = np.concatenate([w.ravel() for w in model.get_weights()])
        assert np.array_equal(now, weights[1]) == bad
        pairs = zip(before, optimizer.variables, strict=True)
        same = [np.array_equal(b, ops.convert_to_numpy(v)) for b, v in pairs]
        assert all(same) == bad


def test_levenberg_marquardt_fits_sinc():
    keras.utils.set_random_seed(1)
    x = np.linspace(-1, 1, 200, dtype="float32")[:, None]
    model = keras.Sequential(
        [keras.Input((1,)), problems.dense(20, "tanh"), problems.dense(1)]
    )
    model.compile(optimizer=kso.LevenbergMarquardt(), loss="mse")
    y = np.sinc(10 * x / np.pi)  # sin(10 x) / (10 x)
    history = model.fit(x, y, batch_size=200, epochs=99, verbose=0).history
    assert history["loss"][-1] < 1e-6


def test_levenberg_marquardt_solves_linear_regression_of_many_outputs():
    random = np.random.default_rng(0)
    x = random.normal(size=(400, 4)).astype("float32")
    y = x @ random.normal(size=(4, 128)) + 0.5 + 0.1 * random.normal(size=(400, 128))
    rows = np.hstack([x, np.ones((400, 1))])
    rest = rows @ np.linalg.lstsq(rows, y, rcond=None)[0] - y
    model = problems.sequential([problems.dense(128)], inputs=(4,))
    model.compile(optimizer=kso.LevenbergMarquardt(), loss="mse")
    model.fit(x, y, batch_size=400, epochs=3, verbose=0)
    found = model.evaluate(x, y, batch_size=400, verbose=0)
    np.testing.assert_allclose(found, np.mean(rest**2), rtol=1e-5)


def test_messages():
    with pytest.raises(ValueError, match="`form` must be one of"):
        kso.LevenbergMarquardt(form="both")
    with pytest.raises(ValueError, match="`negative_curvature` must be one of"):
        kso.Newton(negative_curvature="flip")
    with pytest.raises(ValueError, match="no room for the curvature of a penalty"):
        penalty = keras.regularizers.L2(0.1)
        model = problems.sequential([problems.dense(1, kernel_regularizer=penalty)])
        model.compile(optimizer=kso.LevenbergMarquardt(form="dual"), loss="mse")
        model.train_on_batch(np.ones((4, problems.FEATURES)), np.ones((4, 1)))
    with pytest.raises(ValueError, match="at most 5000. Received a model with 5001"):
        model = problems.sequential([problems.dense(1)], inputs=(5000,))
        model.compile(optimizer=kso.Newton(), loss="mse")
        model.train_on_batch(np.ones((4, 5000)), np.ones((4, 1)))


@pytest.mark.parametrize("form", ["primal", "dual"])
def test_levenberg_marquardt_takes_losses_without_a_distribution(form):
    model = problems.classifier()
    data = problems.classification(8)
    optimizer = kso.LevenbergMarquardt(form=form)
    model.compile(optimizer=optimizer, loss="huber")
    losses = []
    for _ in range(4):
        model.reset_metrics()
        logs = model.train_on_batch(data.x, data.one_hot, return_dict=True)
        losses.append(logs["loss"])
    assert losses[-1] < losses[0]


def test_newton_leaves_a_damping_that_stops_it():
    """A loss of 1e10 makes `lambda` so large that no step is measured at first."""
    model = problems.classifier()
    model.compile(optimizer=kso.Newton(), loss="mse")
    data = problems.classification(24)
    model.train_on_batch(data.x, 1e5 * data.one_hot)
    first = float(model.optimizer.damping_value)
    for _ in range(5):
        model.train_on_batch(data.x, 1e5 * data.one_hot)
    assert float(model.optimizer.damping_value) < 0.5 * first


@pytest.mark.parametrize("form", ["primal", "dual"])
def test_levenberg_marquardt_with_a_dead_input_and_a_penalty(form):
    """Its weight has no curvature, only the penalty's gradient."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(4, 10)).astype("float32")
    x[:, 0] = 0.0
    y = generator.normal(size=(4, 1)).astype("float32")
    dense = keras.layers.Dense(
        1, use_bias=False, kernel_regularizer=keras.regularizers.L1(0.1)
    )
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((10,)), dense])
    model.compile(optimizer=kso.LevenbergMarquardt(form=form), loss="mse")
    history = model.fit(x, y, batch_size=4, epochs=10, verbose=0).history
    # By its own curvature, which is zero, it would move by millions.
    assert abs(float(ops.convert_to_numpy(dense.kernel)[0, 0])) < 10.0
    assert history["loss"][-1] < 0.5 * history["loss"][0]


def test_levenberg_marquardt_without_residuals_takes_the_primal_form():
    class Square(keras.layers.Layer):
        def call(self, z):
            self.add_loss(ops.mean(ops.square(z - 1.0)))
            return z

    layers = [keras.layers.Dense(2), Square()]
    model = keras.Sequential([keras.Input((3,)), *layers])
    model.compile(optimizer=kso.LevenbergMarquardt())
    x = np.random.default_rng(0).normal(size=(16, 3)).astype("float32")
    losses = model.fit(x, batch_size=16, epochs=5, verbose=0).history["loss"]
    assert losses[-1] <= losses[0]
