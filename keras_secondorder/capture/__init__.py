"""Layers seen from outside: wrappers, the recorder, and the plan of blocks."""

from keras_secondorder.capture.activations import recurrent_layers, watching
from keras_secondorder.capture.coverage import (
    FALLBACKS,
    Block,
    Coverage,
    is_built,
    plan_blocks,
    table,
)
from keras_secondorder.capture.recorder import recording
from keras_secondorder.capture.wrapper import LayerWrapper, register_layer_wrapper

__all__ = [
    "FALLBACKS",
    "Block",
    "Coverage",
    "LayerWrapper",
    "is_built",
    "plan_blocks",
    "recording",
    "recurrent_layers",
    "register_layer_wrapper",
    "watching",
    "table",
]
