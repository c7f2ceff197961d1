import keras
import numpy as np
import pytest

from keras_secondorder.initializers import Sparse


def draw(shape, **kwargs):
    return keras.ops.convert_to_numpy(Sparse(**kwargs)(shape))


@pytest.mark.parametrize("shape", [(40, 7), (15, 3), (4, 30), (3, 3, 5, 6)])
def test_each_unit_gets_exactly_the_requested_incoming_weights(shape):
    kernel = draw(shape, nonzeros=15, seed=3).reshape(-1, shape[-1])
    expected = min(15, kernel.shape[0])
    np.testing.assert_array_equal(np.count_nonzero(kernel, axis=0), expected)


def test_units_choose_different_inputs():
    chosen = draw((200, 50), nonzeros=5, seed=0) != 0
    assert len({tuple(column) for column in chosen.T}) == 50


def test_every_input_is_chosen_equally_often():
    # 20,000 units choosing 3 of 10 inputs: each count is binomial with mean 6,000 and
    # standard deviation 65, so 400 is six of them.
    counts = np.count_nonzero(draw((10, 20_000), nonzeros=3, seed=1), axis=1)
    np.testing.assert_allclose(counts, 6_000, atol=400)


def test_values_are_normal_with_the_requested_deviation():
    kernel = draw((100, 2_000), nonzeros=10, stddev=0.5, seed=2)
    values = kernel[kernel != 0]
    # 20,000 values: the mean's standard error is 0.0035, the deviation's 0.0025.
    assert abs(values.mean()) < 0.02
    assert abs(values.std() - 0.5) < 0.015
    assert abs(np.mean(np.abs(values) > 0.5) - 0.3173) < 0.02


def test_default_deviation_is_one():
    kernel = draw((784, 1_000), seed=4)
    assert abs(kernel[kernel != 0].std() - 1.0) < 0.03


def test_one_seed_gives_one_kernel_on_every_backend():
    np.testing.assert_array_equal(draw((30, 8), seed=5), draw((30, 8), seed=5))
    assert np.any(draw((30, 8), seed=5) != draw((30, 8), seed=6))
    # Stated numbers: what one backend draws, the other two draw.
    np.testing.assert_allclose(
        draw((3, 2), nonzeros=1, seed=0), EXPECTED_SEED_0, rtol=1e-6
    )


EXPECTED_SEED_0 = [[0, 0], [1.304, 0.94708097], [0, 0]]


def test_without_a_seed_instances_differ_and_follow_the_global_seed():
    first, second = draw((30, 8)), draw((30, 8))
    assert np.any(first != second)
    keras.utils.set_random_seed(11)
    first = draw((30, 8))
    keras.utils.set_random_seed(11)
    np.testing.assert_array_equal(first, draw((30, 8)))


@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16"])
def test_dtype(dtype):
    kernel = Sparse(seed=0)((20, 4), dtype=dtype)
    expected = dtype or keras.config.floatx()
    assert keras.backend.standardize_dtype(kernel.dtype) == expected


def test_serialization_round_trip():
    layer = keras.layers.Dense(
        6, kernel_initializer=Sparse(nonzeros=4, stddev=2.0, seed=9)
    )
    copy = keras.layers.Dense.from_config(layer.get_config())
    layer.build((None, 12))
    copy.build((None, 12))
    assert copy.kernel_initializer.get_config() == {
        "nonzeros": 4,
        "stddev": 2.0,
        "seed": 9,
    }
    np.testing.assert_array_equal(
        keras.ops.convert_to_numpy(layer.kernel),
        keras.ops.convert_to_numpy(copy.kernel),
    )


def test_a_saved_model_loads_without_custom_objects(tmp_path):
    model = keras.Sequential(
        [keras.Input((12,)), keras.layers.Dense(3, kernel_initializer=Sparse(seed=1))]
    )
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert isinstance(loaded.layers[0].kernel_initializer, Sparse)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"nonzeros": 0}, "integer of at least 1"),
        ({"nonzeros": 2.5}, "integer of at least 1"),
        ({"stddev": -1.0}, "must not be negative"),
        ({"seed": "7"}, "non-negative integer or None"),
        ({"seed": -1}, "non-negative integer or None"),
    ],
)
def test_bad_arguments(kwargs, message):
    with pytest.raises(ValueError, match=message):
        Sparse(**kwargs)


def test_a_bias_is_refused():
    with pytest.raises(ValueError, match="Use 'zeros' for a bias"):
        Sparse()((5,))
