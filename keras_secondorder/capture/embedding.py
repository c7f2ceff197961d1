"""Embeddings: an affine map of one-hot rows, which are never formed."""

import contextlib

import keras
from keras import ops

from keras_secondorder.capture.wrapper import (
    LayerWrapper,
    register_layer_wrapper,
    replaced,
)
from keras_secondorder.capture.wrapper import rows as as_rows


@register_layer_wrapper(keras.layers.Embedding)
class EmbeddingWrapper(LayerWrapper):
    """`s = one_hot(inputs) @ embeddings`, whose input factor is diagonal.

    `A = diag(c)`, with `c` the share of each entry of the vocabulary among the
    positions.
    """

    one_hot = True

    @classmethod
    def reason_against(cls, layer):
        """As for every kernel."""
        if layer.lora_enabled:
            return "LoRA is enabled"
        if layer.quantization_mode is not None:
            return f"quantized to {layer.quantization_mode}"
        return None if layer.embeddings.trainable else "its embeddings are frozen"

    @property
    def variables(self):
        """`[embeddings]`."""
        return [self.layer.embeddings]

    @property
    def d_in(self):
        """Size of the vocabulary."""
        return self.layer.input_dim

    @property
    def d_out(self):
        """Length of a vector."""
        return self.layer.output_dim

    @contextlib.contextmanager
    def record(self, on_input, on_preactivation):
        """Watch the indices and the vectors."""
        layer, forward = self.layer, self.layer.call

        def call(inputs):
            on_input(inputs)
            return on_preactivation(forward(inputs))

        with replaced(layer, call=call):
            yield

    def input_rows(self, inputs):
        """The indices, shape `(N, T)`."""
        indices = ops.cast(inputs, "int32")
        return ops.reshape(indices, (ops.shape(indices)[0], -1))

    def gradient_rows(self, gradient):
        """Flatten the axes between the first and the last."""
        return as_rows(gradient, self.d_out)

    def to_matrix(self, values):
        """The embeddings."""
        return ops.cast(values[0], "float32")

    def from_matrix(self, matrix):
        """The embeddings."""
        return [matrix]


@register_layer_wrapper(keras.layers.ReversibleEmbedding)
class ReversibleEmbeddingWrapper(EmbeddingWrapper):
    """Named, but without a block: the sum over both uses has no Kronecker form."""

    @classmethod
    def reason_against(cls, layer):
        """Used to embed and to project: `A (x) G` and `G (x) A` in one matrix."""
        return "used in both directions"
