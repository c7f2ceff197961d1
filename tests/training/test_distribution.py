"""A model spread over replicas is refused, not trained on wrong statistics."""

import subprocess
import sys

import keras
import pytest

SCRIPT = """
import tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
two = [tf.config.LogicalDeviceConfiguration()] * 2
tf.config.set_logical_device_configuration(cpu, two)
import keras
import keras_secondorder as kso
with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    try:
        model.compile(kso.KFAC(), "mse")
    except ValueError as error:
        print(error)
"""


@pytest.mark.skipif(
    keras.config.backend() != "tensorflow", reason="tf.distribute is TensorFlow's"
)
def test_several_replicas_are_refused():
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, check=True, text=True
    )
    assert "MirroredStrategy with 2 replicas" in run.stdout
