"""Watching what chosen layers put out, for damping that acts on activations."""

import contextlib

import keras

from keras_secondorder.capture.coverage import sublayers
from keras_secondorder.capture.wrapper import replaced


@contextlib.contextmanager
def watching(layers: list):
    """Collect the outputs of some layers while the model is called in the context.

    Recurrent layers are seen at all time steps, also where they return the last only.

    Args:
        layers: Keras layers of the model.

    Yields:
        A list, to which every call of every layer adds one tensor.
    """
    outputs = []
    with contextlib.ExitStack() as stack:
        for layer in layers:
            watch = _sequences if isinstance(layer, keras.layers.RNN) else _outputs
            stack.enter_context(watch(layer, outputs.append))
        yield outputs


def recurrent_layers(model) -> list:
    """The recurrent layers of a model, those inside other layers included."""
    found, seen = [], set()

    def visit(layer):
        if id(layer) in seen:
            return
        seen.add(id(layer))
        if isinstance(layer, keras.layers.RNN):
            found.append(layer)
            return
        for child in sublayers(layer):
            visit(child)

    visit(model)
    return found


def _outputs(layer, on_output):
    forward = layer.call

    def call(*args, **kwargs):
        result = forward(*args, **kwargs)
        on_output(result)
        return result

    return replaced(layer, call=call)


def _sequences(layer, on_output):
    forward, returns_sequences = layer.call, layer.return_sequences

    def call(*args, **kwargs):
        # For the call alone: `compute_mask` after it goes by the same attribute.
        with replaced(layer, return_sequences=True):
            result = forward(*args, **kwargs)
        states = tuple(result[1:]) if layer.return_state else ()
        sequence = result[0] if layer.return_state else result
        on_output(sequence)
        wanted = sequence if returns_sequences else sequence[:, -1]
        return (wanted, *states) if layer.return_state else wanted

    return replaced(layer, call=call)
