"""What all tests share: the same random numbers in each run, whatever ran before."""

import gc

import keras
import pytest

# What the backends leave behind on import stays. Without it, each of the many
# collections that tracing sets off has fewer objects to look at.
gc.collect()
gc.freeze()
# And fewer of them: by default, each 700 new objects set one off.
gc.set_threshold(200_000, 20, 100)

# A graph that runs a few times costs more to optimise than that saves: a quarter of the
# time of the tests in `training`. The examples run with the optimiser.
if keras.backend.backend() == "tensorflow":
    import tensorflow as tf

    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})


@pytest.fixture(autouse=True)
def seeded():
    keras.utils.set_random_seed(0)
