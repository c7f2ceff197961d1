"""Layers seen from outside: wrappers, the recorder, and the plan of blocks."""

from keras_secondorder.capture import (  # noqa: F401  each registers its wrappers
    convolution,
    dense,
    einsum_dense,
    embedding,
    normalization,
    recurrent,
    separable,
)
from keras_secondorder.capture.activations import recurrent_layers, watching
from keras_secondorder.capture.coverage import (
    FALLBACKS,
    Block,
    Coverage,
    all_layers,
    check_layers,
    has_foreign_layers,
    is_built,
    places_of,
    plan_blocks,
    sublayers,
    table,
    wrapper_of,
)
from keras_secondorder.capture.memory import Side, eigenvalue_shape
from keras_secondorder.capture.penalties import l2_curvature
from keras_secondorder.capture.recorder import of_wrapper, recording
from keras_secondorder.capture.wrapper import (
    LayerWrapper,
    register_layer_wrapper,
    replaced,
)

__all__ = [
    "FALLBACKS",
    "Block",
    "Coverage",
    "LayerWrapper",
    "Side",
    "all_layers",
    "check_layers",
    "eigenvalue_shape",
    "has_foreign_layers",
    "is_built",
    "l2_curvature",
    "of_wrapper",
    "places_of",
    "plan_blocks",
    "recording",
    "recurrent_layers",
    "register_layer_wrapper",
    "replaced",
    "sublayers",
    "watching",
    "table",
    "wrapper_of",
]
