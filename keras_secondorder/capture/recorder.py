"""Watching a forward pass: the inputs of the wrapped layers, and taps after them."""

import contextlib

import keras

from keras_secondorder.capture.wrapper import LayerWrapper


@contextlib.contextmanager
def recording(wrappers: list[LayerWrapper], tap):
    """Watch the wrapped layers while the model is called inside the context.

    The layers are as before when the context is left, by whatever way.

    Args:
        wrappers: The layers to watch. None of them may be called twice.
        tap: `tap(name, tensor)`, given each pre-activation under the wrapper's index.

    Yields:
        Dict from the wrapper's index to the input of its layer.
    """
    inputs = {}

    def watch(index):
        def on_input(tensor):
            if index in inputs:
                raise RuntimeError(
                    f"The layer '{wrappers[index].layer.name}' was called twice in one "
                    "forward pass, and its curvature block was laid out for one call. "
                    "Build the model with `model(x)` or `model.build(shape)` before "
                    "`compile`, so that the calls can be counted."
                )
            inputs[index] = tensor

        return wrappers[index].record(on_input, lambda s: tap(index, s))

    with contextlib.ExitStack() as stack:
        for index in range(len(wrappers)):
            stack.enter_context(watch(index))
        yield inputs


def count_calls(model, wrappers: list[LayerWrapper]) -> dict | None:
    """How often each wrapped layer runs in one forward pass, without computing it.

    Args:
        model: A built Keras model.
        wrappers: The layers to count.

    Returns:
        Dict from wrapper to count, or None where the model's input is not known.
    """
    spec = _input_spec(model)
    if spec is None:
        return None
    counts = dict.fromkeys(wrappers, 0)

    def count(wrapper):
        def on_input(tensor):
            counts[wrapper] += 1

        return wrapper.record(on_input, lambda s: s)

    class Forward(keras.Operation):
        def call(self, x):
            with contextlib.ExitStack() as stack:
                for wrapper in wrappers:
                    counts[wrapper] = 0
                    stack.enter_context(count(wrapper))
                return model(x)

    Forward().compute_output_spec(spec)
    return counts


def _input_spec(model):
    """The model's input as symbolic tensors, or None where it is not known."""
    inputs = getattr(model, "inputs", None)
    if inputs:
        given = inputs if len(inputs) > 1 else inputs[0]
        if not isinstance(model, keras.Sequential):
            given = model.input  # in the structure that the model is called with
        return keras.tree.map_structure(
            lambda t: keras.KerasTensor(t.shape, t.dtype, name=t.name), given
        )
    config = model.get_build_config() or {}
    shape = config.get("input_shape")
    if shape is None:
        return None
    if isinstance(shape, dict):
        return {name: keras.KerasTensor(s) for name, s in shape.items()}
    if shape and isinstance(shape[0], list | tuple):
        return [keras.KerasTensor(s) for s in shape]
    return keras.KerasTensor(shape)
