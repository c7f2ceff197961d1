"""Fixtures for the solvers: isolated float64, and compiling on this backend."""

import keras
import numpy as np
import pytest


def _compilers():
    backend = keras.config.backend()
    if backend == "jax":
        import jax

        return {"jit": jax.jit}
    if backend == "tensorflow":
        import tensorflow as tf

        return {
            "graph": tf.function(jit_compile=False),
            "xla": tf.function(jit_compile=True),
        }
    return {}  # torch runs the solvers eagerly


def pytest_generate_tests(metafunc):
    if "compiled" in metafunc.fixturenames:
        compilers = _compilers()
        metafunc.parametrize("compiled", compilers.values(), ids=compilers.keys())


@pytest.fixture
def float64():
    """Compute in float64 in this test only."""
    before = keras.config.floatx()
    keras.config.set_floatx("float64")
    try:
        if keras.config.backend() == "jax":
            import jax

            with jax.enable_x64(True):
                yield
        else:
            yield
    finally:
        keras.config.set_floatx(before)


@pytest.fixture
def product():
    """Turn a dense NumPy matrix into a matvec in the dtype of Keras's floatx."""

    def of(matrix):
        matrix = keras.ops.convert_to_tensor(np.asarray(matrix, keras.config.floatx()))
        # `ops.matmul` would compute in float32 on torch.
        return lambda v: keras.ops.squeeze(matrix @ keras.ops.expand_dims(v, 1), 1)

    return of


@pytest.fixture
def tensor():
    def of(array):
        return keras.ops.convert_to_tensor(np.asarray(array, keras.config.floatx()))

    return of


@pytest.fixture
def assert_same():
    """Compare two results field by field, integers exactly."""

    def check(actual, expected, atol):
        actual = keras.tree.flatten(actual)
        expected = keras.tree.flatten(expected)
        assert len(actual) == len(expected)
        for a, e in zip(actual, expected, strict=True):
            if e is None:
                assert a is None
                continue
            a, e = keras.ops.convert_to_numpy(a), keras.ops.convert_to_numpy(e)
            assert a.dtype == e.dtype
            exact = np.issubdtype(e.dtype, np.integer)
            np.testing.assert_allclose(a, e, rtol=0, atol=0 if exact else atol)

    return check
