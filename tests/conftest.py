"""What all tests share: the same random numbers in each run, whatever ran before."""

import keras
import pytest


@pytest.fixture(autouse=True)
def seeded():
    keras.utils.set_random_seed(0)
