"""The ways in which a backend runs a function of tensors."""

import keras

BACKEND = keras.backend.backend()


def _modes():
    if BACKEND == "jax":
        import jax

        return {"eager": lambda f: f, "jit": jax.jit}
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return {
            "eager": lambda f: f,
            "graph": tf.function(jit_compile=False),
            "xla": tf.function(jit_compile=True),
        }
    return {"eager": lambda f: f}


MODES = _modes()
