"""What all tests share: the same random numbers in each run, whatever ran before."""

import gc

import keras
import pytest


@pytest.fixture(autouse=True)
def seeded():
    keras.utils.set_random_seed(0)


@pytest.fixture(autouse=True, scope="module")
def collected():
    """Collect garbage after each file: between graphs and programs it takes a while."""
    gc.disable()
    yield
    gc.enable()
    gc.collect()
