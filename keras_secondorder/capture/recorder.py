"""Watching a forward pass: the inputs of the wrapped layers, and taps after them."""

import contextlib
from typing import NamedTuple

import keras

from keras_secondorder.capture.wrapper import LayerWrapper, replaced


@contextlib.contextmanager
def recording(wrappers: list[LayerWrapper], tap):
    """Watch the wrapped layers while the model is called inside the context.

    The layers are as before when the context is left, by whatever way.

    Args:
        wrappers: The layers to watch.
        tap: `tap(name, tensor)`, given each pre-activation under the name
            `(wrapper's index, number of the call)`.

    Yields:
        Dict from the wrapper's index to the inputs of its layer, one for each call.
    """
    inputs, seen = {}, [0] * len(wrappers)

    def watch(index):
        def on_input(tensor):
            inputs.setdefault(index, []).append(tensor)

        def on_preactivation(tensor):
            seen[index] += 1
            return tap((index, seen[index] - 1), tensor)

        return wrappers[index].record(on_input, on_preactivation)

    with contextlib.ExitStack() as stack:
        for index in range(len(wrappers)):
            stack.enter_context(watch(index))
        yield inputs


def of_wrapper(taps: dict, index: int) -> list:
    """The gradients at one layer's pre-activations, in the order of its calls.

    Args:
        taps: Tensors by the names that `recording` gives.
        index: The wrapper's index.
    """
    calls = sorted(call for i, call in taps if i == index)
    return [taps[index, call] for call in calls]


class Uses(NamedTuple):
    """How a model uses its wrapped layers in one forward pass.

    Attributes:
        calls: Dict from wrapper to the number of calls of its layer.
        outside: Ids of variables that were read outside of their layer's call.
        ranks: Dict from wrapper to the number of axes of its layer's last input.
    """

    calls: dict
    outside: set
    ranks: dict


def count_uses(model, wrappers: list[LayerWrapper]) -> Uses | None:
    """Run one forward pass, without computing it, to see what it uses.

    Args:
        model: A built Keras model.
        wrappers: The layers to look at.

    Returns:
        What was seen, or None where the model's input is not known.
    """
    spec = _input_spec(model)
    if spec is None:
        return None
    uses = Uses(dict.fromkeys(wrappers, 0), set(), {})
    owners = {id(v): w for w in wrappers for v in w.variables}
    running = []

    class Reads(keras.StatelessScope):
        """A scope that is asked for the value of each variable that is read."""

        def get_current_value(self, variable):
            owner = owners.get(id(variable))
            if owner is not None and owner not in running:
                uses.outside.add(id(variable))
            return super().get_current_value(variable)

    def watch(wrapper, stack):
        def on_input(tensor):
            uses.calls[wrapper] += 1
            # A recurrent layer may hand on several tensors at once.
            uses.ranks[wrapper] = len(getattr(tensor, "shape", ()))

        stack.enter_context(wrapper.record(on_input, lambda s: s))
        forward = wrapper.layer.call

        def call(*args, **kwargs):
            running.append(wrapper)
            try:
                return forward(*args, **kwargs)
            finally:
                running.pop()

        stack.enter_context(replaced(wrapper.layer, call=call))

    class Forward(keras.Operation):
        def call(self, x):
            uses.calls.update(dict.fromkeys(wrappers, 0))
            with contextlib.ExitStack() as stack:
                for wrapper in wrappers:
                    watch(wrapper, stack)
                with Reads():
                    return model(x)

    Forward().compute_output_spec(spec)
    return uses


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
