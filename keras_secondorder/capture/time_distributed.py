"""TimeDistributed around a layer that treats its examples alike."""

import contextlib

import keras
from keras import ops

from keras_secondorder.capture.wrapper import LayerWrapper, replaced, wrapper_class_of

# What these do to one time step does not depend on the others, nor on a mask.
ALIKE = (
    keras.layers.Dense,
    keras.layers.EinsumDense,
    keras.layers.Conv1D,
    keras.layers.Conv2D,
    keras.layers.Conv3D,
    keras.layers.Conv1DTranspose,
    keras.layers.Conv2DTranspose,
    keras.layers.Conv3DTranspose,
    keras.layers.DepthwiseConv1D,
    keras.layers.DepthwiseConv2D,
    keras.layers.SeparableConv1D,
    keras.layers.SeparableConv2D,
)


def time_distributed(layer: keras.layers.TimeDistributed):
    """The wrapper class for a `TimeDistributed` layer, or None.

    TimeDistributed calls its layer once for every step, inside a loop or a vectorised
    map. While it is watched, the steps of all examples are given to the layer at once,
    as if they were examples, which is the same computation.
    """
    inner = layer.layer if isinstance(layer.layer, ALIKE) else None
    return None if inner is None else wrapper_class_of(inner)


def for_all_steps(wrapper: LayerWrapper, outer) -> LayerWrapper:
    """Let the wrapper of the inner layer watch all steps at once.

    Args:
        wrapper: The wrapper of the layer inside.
        outer: The `TimeDistributed` layer.
    """
    record = wrapper.record

    @contextlib.contextmanager
    def record_all(on_input, on_preactivation):
        def call(inputs, training=None, mask=None):
            shape = ops.shape(inputs)
            flat = ops.reshape(inputs, (shape[0] * shape[1], *shape[2:]))
            outputs = wrapper.layer(flat)
            return ops.reshape(outputs, (*shape[:2], *ops.shape(outputs)[1:]))

        with record(on_input, on_preactivation), replaced(outer, call=call):
            yield

    wrapper.record = record_all
    return wrapper
