"""Models made of whitened layers, and their whitening by what they see."""

import contextlib

import keras
import numpy as np
from keras import ops

from keras_secondorder.capture import replaced, sublayers
from keras_secondorder.layers.whitened import WhitenedLayer
from keras_secondorder.layers.whitened_convolution import (
    WhitenedConv1D,
    WhitenedConv2D,
    WhitenedConv3D,
)
from keras_secondorder.layers.whitened_dense import WhitenedDense

WHITENED = {
    keras.layers.Dense: WhitenedDense,
    keras.layers.Conv1D: WhitenedConv1D,
    keras.layers.Conv2D: WhitenedConv2D,
    keras.layers.Conv3D: WhitenedConv3D,
}
# Examples whose patches are in memory at once.
CHUNK = 64


def whiten(model: keras.Model) -> keras.Model:
    """A model of the same function with whitened layers.

    `WhitenedDense`, `WhitenedConv1D`, `WhitenedConv2D` and `WhitenedConv3D` take the
    place of the plain layers. Those without a bias, with groups, with LoRA or quantized
    stay as they are, as do subclasses and layers inside of other layers and models.

    Args:
        model: A built Sequential or functional model; its weights are copied.

    Returns:
        A new model, not compiled. Call `rewhiten(model, x)` before training it, and
        every now and then.

    Raises:
        ValueError: It is neither, or not built.
    """
    if not getattr(model, "inputs", None):
        raise ValueError(
            "`whiten` takes a built Sequential or functional model. "
            f"Received {model!r}. Build it first."
        )

    def convert(layer):
        kind = type(layer)
        if kind in WHITENED and layer.use_bias and _has_plain_kernel(layer):
            kind = WHITENED[kind]
        return kind.from_config(layer.get_config())

    new = keras.models.clone_model(model, clone_function=convert)
    for old, layer in zip(model.layers, new.layers, strict=True):
        if type(layer) is not type(old):
            layer.kernel.assign(old.kernel)
            layer.bias.assign(old.bias)
        else:
            layer.set_weights(old.get_weights())
    return new


def _has_plain_kernel(layer) -> bool:
    adapted = layer.lora_enabled or getattr(layer, "quantization_mode", None)
    return not adapted and getattr(layer, "groups", 1) == 1


def rewhiten(model: keras.Model, x, epsilon: float = 0.1) -> None:
    """Whiten all whitened layers by what they see of some inputs.

    The function of the model does not change. Statistics come from one forward pass in
    inference mode; layers inside of layers are found too.

    Args:
        model: A built model.
        x: A batch of inputs.
        epsilon: See `WhitenedDense.set_whitening`.

    Raises:
        ValueError: It has no such layer, or one with LoRA; there are no inputs, or some
            are not finite.

    Example:
        >>> import keras, numpy as np
        >>> from keras_secondorder.layers import rewhiten, whiten
        >>> plain = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        >>> x = np.random.default_rng(0).normal(5.0, 2.0, (64, 3))
        >>> model = whiten(plain)
        >>> rewhiten(model, x)
        >>> np.allclose(model(x), plain(x), atol=1e-4)
        True
    """
    layers = _whitened(model)
    if not layers:
        raise ValueError(
            "The model has no whitened layer. Make one with `whiten(model)`."
        )
    seen = {id(layer): [] for layer in layers}

    def recording(layer):
        forward = layer.call

        def call(inputs, *args, **kwargs):
            seen[id(layer)].append(ops.stop_gradient(inputs))
            return forward(inputs, *args, **kwargs)

        return replaced(layer, call=call)

    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.enter_context(recording(layer))
        model(x, training=False)
    for layer in layers:
        if seen[id(layer)]:
            layer.set_whitening(*_moments(layer, seen[id(layer)]), epsilon)


def _moments(layer, inputs) -> tuple:
    """The mean and the covariance of what a layer saw, in float64; NaN of nothing."""
    count = total = square = 0
    origin = None
    for h in inputs:
        for start in range(0, h.shape[0], CHUNK):
            rows = layer.input_rows(h[start : start + CHUNK])
            rows = ops.convert_to_numpy(rows).astype("float64")
            if origin is None:  # near the mean, for the digits of the squares
                origin = rows.mean(0)
            rows = rows - origin
            count, total = count + len(rows), total + rows.sum(0)
            square = square + rows.T @ rows
    if not count:
        return np.nan, np.nan
    mean = total / count
    return origin + mean, square / count - np.outer(mean, mean)


def _whitened(layer) -> list:
    own = [layer] if isinstance(layer, WhitenedLayer) else []
    return own + [w for child in sublayers(layer) for w in _whitened(child)]
