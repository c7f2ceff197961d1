"""KFAC's arguments: checked, kept, saved, and Keras's own with Keras's meaning."""

import json

import keras
import numpy as np
import pytest
from keras import layers
from training.loop import (
    arrays,
    assert_close,
    classifier,
    compiled,
    examples,
    fit,
    moved,
)

import keras_secondorder as kso

# One float32 step against the same step of SGD, on a direction read off the weights.
STEP_RTOL = 1e-5


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"learning_rate": "fast"}, "number, a schedule or 'adaptive'"),
        ({"momentum": "adaptive"}, "or 'adaptive' where the learning rate is"),
        ({"learning_rate": "adaptive", "momentum": "nesterov"}, "momentum='nesterov'"),
        ({"fisher": "true"}, r"must be one of \('sampled', 'exact', 'empirical'\)"),
        ({"statistics_fraction": 0.0}, "`statistics_fraction` must be above 0"),
        ({"statistics_fraction": "half"}, "`statistics_fraction` must be a number or"),
        ({"inverse_every": "auto"}, "`inverse_every` must be an integer of at least 1"),
        ({"inverse_every": np.int64(0)}, "`inverse_every` must be an integer"),
        ({"statistics_every": None}, "`statistics_every` must be an integer"),
        ({"rank": 2.5}, "`rank` must be an integer of at least 1"),
        ({"momentum": np.float32(5)}, "`momentum` must be at least 0 and below 1"),
        ({"norm_constraint": np.float32(-1)}, "`norm_constraint` must be above 0"),
        ({"relative_step": 0.0}, "`relative_step` must be above 0"),
        ({"relative_step": np.float32(-1)}, "`relative_step` must be above 0"),
        ({"relative_step": kso.RelativeRadius()}, "a schedule, a `RelativeStep`, None"),
        (
            {"learning_rate": "adaptive", "relative_step": 0.1},
            "`norm_constraint` bounds them",
        ),
        (
            {"step_rule": kso.TrustRegionStep(), "norm_constraint": None},
            "`norm_constraint` would be ignored",
        ),
        (
            {"step_rule": kso.AdaptiveStep(), "momentum": 0.5},
            r"as in `TrustRegionStep\(momentum=...\)`",
        ),
        ({"norm_constraint": -1.0}, "`norm_constraint` must be above 0"),
        ({"norm_constraint": object()}, "a schedule, a `RelativeRadius`, None"),
        ({"momentum": None}, "`momentum` must be at least 0 and below 1"),
        ({"step_rule": "adaptive"}, "`step_rule` must be a `StepRule`, or None"),
        (
            {"step_rule": kso.TrustRegionStep(), "learning_rate": "adaptive"},
            "is the rule `AdaptiveStep`, and another was given",
        ),
        ({"quadratic_fraction": 1.5}, "Received quadratic_fraction=1.5"),
        ({"statistics_every": 0}, "statistics_every"),
        ({"inverse_every": 0}, "inverse_every"),
        ({"statistics_decay": 1.5}, "statistics_decay"),
        ({"damping": -1.0}, "damping"),
        ({"on_unsupported": "skip"}, "on_unsupported"),
        ({"max_factor_size": 0}, "max_factor_size"),
    ],
    ids=str,
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        kso.KFAC(**arguments)


def test_wrong_damping_rule():
    with pytest.raises(ValueError, match="`decay` must lie between 0 and 1"):
        kso.AdaptiveDamping(decay=1.0)
    with pytest.raises(ValueError, match="every"):
        kso.AdaptiveDamping(every=0)
    for wrong in ((-0.01,), (float("nan"),), (0.01, 0), (0.01, float("nan"))):
        for bound in (kso.RelativeStep, kso.RelativeRadius):
            with pytest.raises(ValueError, match="`fraction` must be above 0, and"):
                bound(*wrong)
    for initial in ("Auto", -1.0, float("nan"), np.inf):
        with pytest.raises(ValueError, match="must be a number of at least 0, None"):
            kso.AdaptiveDamping(initial)
    for bounds in ({"minimum": -1.0}, {"minimum": 2.0, "maximum": 1.0}):
        with pytest.raises(ValueError, match="`minimum` must be at least 0 and at"):
            kso.AdaptiveDamping(**bounds)
    for share in (0.0, float("nan")):
        with pytest.raises(ValueError, match="`share` must be a number above 0"):
            kso.AdaptiveDamping(None, share=share)
    with pytest.raises(ValueError, match="`initial` must lie between `minimum` and"):
        kso.AdaptiveDamping(0.1, minimum=0.2)
    with pytest.raises(ValueError, match="must be True or False"):
        kso.AdaptiveDamping(0.2, relative="no")
    with pytest.raises(ValueError, match="Give a number as `initial`"):
        kso.AdaptiveDamping(None, relative=True)
    with pytest.raises(ValueError, match="in units of the blocks of `KFAC`"):
        kso.HessianFree(damping=kso.AdaptiveDamping(relative=True))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("auto",), "`momentum` must be at least 0 and below 1"),
        ((0.9, -1.0), "`norm_constraint` must be above 0"),
        ((0.9, None, -1.0), "`relative_step` must be above 0"),
        ((0.9, "auto"), "`norm_constraint` must be a number"),
        ((0.9, None, object()), "a schedule, a `RelativeStep`, None"),
    ],
)
def test_wrong_step_rule(arguments, message):
    with pytest.raises(ValueError, match=message):
        kso.KFAC(step_rule=kso.TrustRegionStep(*arguments))


def test_damping_starts_by_its_unit():
    assert kso.AdaptiveDamping().initial == 150.0
    assert kso.AdaptiveDamping(relative=True).initial == 0.2
    assert kso.AdaptiveDamping(3.0, relative=True).initial == 3.0


def decay(start):
    return keras.optimizers.schedules.ExponentialDecay(start, 10, 0.5)


OPTIMIZERS = {
    "defaults": kso.KFAC,
    "thesis": lambda: kso.KFAC.thesis(damping=3.0),
    "thesis_fixed_momentum": lambda: kso.KFAC.thesis(momentum=0.5, seed=4),
    "schedules": lambda: kso.KFAC(
        decay(0.3),
        decay(0.9),
        damping=decay(2.0),
        norm_constraint=decay(0.1),
        relative_step=decay(0.05),
    ),
    "parts": lambda: kso.KFAC(
        0.5,
        damping=kso.AdaptiveDamping(2.0, 3, 0.9, 1e-3, 10.0, None),
        step_rule=kso.TrustRegionStep(decay(0.8), 1e-2),
        fisher="exact",
        statistics_fraction=0.5,
        quadratic_fraction=0.75,
        statistics_every=3,
        inverse_every=7,
        statistics_decay=0.9,
        on_unsupported="gradient",
        max_factor_size=100,
        seed=3,
    ),
    "adaptive_rule": lambda: kso.KFAC(step_rule=kso.AdaptiveStep(decay(0.5), 0.1)),
    "keras": lambda: kso.KFAC(
        weight_decay=1e-3, clipnorm=2.0, use_ema=True, ema_momentum=0.9, name="mine"
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_config_round_trip(name):
    optimizer = OPTIMIZERS[name]()
    config = optimizer.get_config()
    text = json.dumps(keras.saving.serialize_keras_object(optimizer))
    again = keras.saving.deserialize_keras_object(json.loads(text))
    assert type(again) is kso.KFAC
    assert again.get_config() == config
    direct = kso.KFAC.from_config(config)
    assert direct.get_config() == config
    for part in (
        "damping",
        "momentum",
        "norm_constraint",
        "relative_step",
        "step_rule",
    ):
        assert type(getattr(direct, part)) is type(getattr(optimizer, part)), part
    assert direct.adaptive == optimizer.adaptive


def test_config_has_every_argument():
    import inspect

    names = set(inspect.signature(kso.KFAC.__init__).parameters) - {"self", "kwargs"}
    assert names <= set(kso.KFAC().get_config())


def linear(**kwargs):
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((6,)), layers.Dense(3, **kwargs)])


@pytest.fixture(scope="module")
def plain():
    """Weights before and after one step with a learning rate of 1."""
    model = compiled(linear(), kso.KFAC(1.0, **UNBOUNDED))
    before = arrays(model.weights)
    fit(model, *examples(16), batch_size=16)
    return before, arrays(model.weights)


UNBOUNDED = {"damping": 0.1, "norm_constraint": None, "relative_step": None}
SHARED = {
    "clipnorm": {"clipnorm": 0.3},
    "global_clipnorm": {"global_clipnorm": 0.3},
    "clipvalue": {"clipvalue": 0.05},
    "weight_decay": {"weight_decay": 0.2},
    "accumulation": {"gradient_accumulation_steps": 2},
}


@pytest.mark.parametrize("name", SHARED)
def test_shared_arguments_do_what_they_do_in_sgd(name, plain):
    before, after = plain
    settings = {**UNBOUNDED, **SHARED[name]}
    model = compiled(linear(), kso.KFAC(1.0, **settings))
    fit(model, *examples(16), batch_size=16)

    variables = [keras.Variable(value) for value in before]
    sgd = keras.optimizers.SGD(1.0, **SHARED[name])
    direction = [
        keras.ops.convert_to_tensor(b - a) for a, b in zip(after, before, strict=True)
    ]
    sgd.apply(direction, variables)
    sgd.finalize_variable_values(variables)
    assert_close(arrays(model.weights), arrays(variables), STEP_RTOL)
    assert any(moved(arrays(variables), after))


def test_ema_averages_the_weights_of_the_steps():
    x, y = examples(16)
    path = []
    each = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: path.append(arrays(model.weights))
    )
    averages = []
    for kwargs in ({}, {"use_ema": True, "ema_momentum": 0.75}):
        model = compiled(linear(), kso.KFAC(**kwargs))
        path.clear()
        fit(model, x, y, batch_size=16, epochs=3, callbacks=[each])
        first, second, third = path
        # Keras's average starts as the weights after the first step, and is put in
        # the weights' place when training ends.
        averages.append(
            [
                0.75 * (0.75 * a + 0.25 * b) + 0.25 * c
                for a, b, c in zip(first, second, third, strict=True)
            ]
        )
    assert_close(arrays(model.weights), averages[0], STEP_RTOL)
    assert all(moved(averages[0], third))


def test_constraints_are_respected():
    constraint = keras.constraints.UnitNorm(axis=0)
    model = compiled(linear(kernel_constraint=constraint))
    fit(model, *examples(16), batch_size=16, epochs=3)
    norms = np.linalg.norm(arrays(model.weights)[0], axis=0)
    np.testing.assert_allclose(norms, 1.0, rtol=1e-5)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision(policy):
    x, y = examples(16)
    keras.config.set_dtype_policy(policy)
    try:
        model = compiled(classifier(), kso.KFAC(0.1, damping=1.0))
    finally:
        keras.config.set_dtype_policy("float32")
    outer = model.optimizer
    inner = getattr(outer, "inner_optimizer", outer)
    scaled = isinstance(outer, keras.optimizers.LossScaleOptimizer)
    assert scaled == (policy == "mixed_float16")
    before = arrays(model.weights)
    history = fit(model, x, y, batch_size=16, epochs=12)
    assert history["loss"][-1] < 0.9 * history["loss"][0]
    assert all(moved(arrays(model.weights), before))
    for block in inner.blocks:
        for v in [*block.factors, *block.inverses]:
            assert v.dtype == "float32"
            assert np.isfinite(arrays([v])[0]).all()
    assert all(np.isfinite(w).all() for w in arrays(model.weights))
    # An overflow of the initial loss scale may skip a step; it must not skip on.
    assert history["skipped_steps"][-1] <= 3
