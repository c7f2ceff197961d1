"""What a layer wrapper is, and the table of them."""

import contextlib
from collections.abc import Callable

import keras
from keras import ops

from keras_secondorder import vectors


class LayerWrapper:
    """An affine layer seen as rows: `s = a W`, with `W = [kernel; bias]`.

    A wrapper exists beside its layer and changes it only inside `recording`. It says
    how the layer's arrays become rows `(examples, positions, features)` and how the
    layer's variables become the matrix `W` of shape `(d_in, d_out)`, where `d_in`
    counts the bias. Everything else is the same for all layers.

    A layer that applies one such map to each of several groups of its features has
    `stack` matrices: rows `(stack, examples, positions, features)`, and `W` of shape
    `(stack, d_in, d_out)`.

    Args:
        layer: A built Keras layer.
    """

    #: "kronecker", or "unitwise" for layers that are no affine map of their input.
    kind = "kronecker"
    #: Whether `input_rows` gives indices of one-hot rows, shape (examples, positions).
    one_hot = False
    #: Whether `input_rows` end with the 1 that carries a bias.
    has_bias = False
    #: Number of matrices, with their own factors each.
    stack = 1

    def __init__(self, layer: keras.layers.Layer):
        self.layer = layer

    @classmethod
    def reason_against(cls, layer: keras.layers.Layer) -> str | None:
        """Why this layer cannot be wrapped, in a few words, or None if it can."""
        return None

    @classmethod
    def of(cls, layer: keras.layers.Layer) -> "LayerWrapper":
        """The wrapper of one layer, where that depends on its settings."""
        return cls(layer)

    @property
    def variables(self) -> list:
        """The trainable variables that the block covers."""
        raise NotImplementedError

    @property
    def left_out(self) -> str:
        """Why trainable variables of the layer, if some do, miss in `variables`."""
        return "not part of the layer's affine map"

    @property
    def d_in(self) -> int:
        """Rows of `W`, the bias included."""
        raise NotImplementedError

    @property
    def d_out(self) -> int:
        """Columns of `W`."""
        raise NotImplementedError

    @contextlib.contextmanager
    def record(self, on_input: Callable, on_preactivation: Callable):
        """A context in which the layer's forward pass is watched.

        By default the input is what `call` is given, and the pre-activation what the
        layer's attribute `activation` is given.

        Args:
            on_input: Called with each input tensor.
            on_preactivation: Called with each pre-activation; what it returns takes
                the place of the pre-activation.
        """
        layer, forward, activation = self.layer, self.layer.call, self.layer.activation

        def tapped(preactivation):
            preactivation = on_preactivation(preactivation)
            return preactivation if activation is None else activation(preactivation)

        def call(inputs, *args, **kwargs):
            on_input(inputs)
            return forward(inputs, *args, **kwargs)

        with replaced(layer, call=call, activation=tapped):
            yield

    def input_rows(self, inputs):
        """The input as float32 `(examples, positions, d_in)`, the 1 appended."""
        raise NotImplementedError

    def gradient_rows(self, gradient):
        """A pre-activation gradient as `(examples, positions, d_out)` in float32."""
        raise NotImplementedError

    def to_matrix(self, values: list):
        """`W`, shape `(d_in, d_out)`, from tensors shaped like `variables`."""
        raise NotImplementedError

    def from_matrix(self, matrix) -> list:
        """Tensors shaped like `variables` from `W`; the inverse of `to_matrix`."""
        raise NotImplementedError

    def from_product(self, a, g) -> list:
        """Tensors shaped like `variables` from `W = a^T g`."""
        return self.from_matrix(ops.matmul(ops.transpose(a), g))

    # --- layers that are several affine maps; one map is the rule -------------------

    @property
    def parts(self) -> list["LayerWrapper"]:
        """One wrapper for each affine map, all given the same input and gradient."""
        return [self]

    def split(self, values: list) -> list[list]:
        """Tensors shaped like `variables`, as those of each part."""
        return [values]

    def join(self, parts: list[list]) -> list:
        """The inverse of `split`."""
        return parts[0]


class KernelAndBias:
    """Mixin for layers with `kernel` and `bias`: which of them are trained."""

    @classmethod
    def reason_against(cls, layer):
        """A kernel that is not the variable itself has another gradient."""
        if getattr(layer, "lora_enabled", False):
            return "LoRA is enabled"
        if getattr(layer, "quantization_mode", None) is not None:
            return f"quantized to {layer.quantization_mode}"
        if not layer.kernel.trainable:
            return "its kernel is frozen"
        return None

    @property
    def has_bias(self) -> bool:
        """Whether the bias is part of the block."""
        return self.layer.bias is not None and self.layer.bias.trainable

    @property
    def variables(self):
        """`[kernel]` or `[kernel, bias]`."""
        bias = [self.layer.bias] if self.has_bias else []
        return [self.layer.kernel, *bias]


_WRAPPERS: dict[type, type[LayerWrapper]] = {}


def register_layer_wrapper(*layer_classes: type) -> Callable:
    """Make a `LayerWrapper` known for layer classes; use as a class decorator.

    Args:
        *layer_classes: The Keras layer classes. Subclasses that do not override `call`
            are wrapped too.

    Returns:
        The decorator.
    """

    def register(wrapper_class: type[LayerWrapper]) -> type[LayerWrapper]:
        for layer_class in layer_classes:
            _WRAPPERS[layer_class] = wrapper_class
        return wrapper_class

    return register


def wrapper_class_of(layer: keras.layers.Layer) -> type[LayerWrapper] | None:
    """The wrapper registered for a layer's class, or None."""
    for cls in type(layer).__mro__:
        if cls in _WRAPPERS:
            return _WRAPPERS[cls] if type(layer).call is cls.call else None
    return None


@contextlib.contextmanager
def replaced(layer, **attributes):
    """Give an object other attributes for a while, unseen by Keras's tracking.

    The instance's dictionary is written to directly: assigning the attribute would
    register it with the layer, and the restored value a second time.
    """
    missing = object()
    before = {name: layer.__dict__.get(name, missing) for name in attributes}
    layer.__dict__.update(attributes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is missing:
                layer.__dict__.pop(name, None)
            else:
                layer.__dict__[name] = value


def rows(tensor, width: int):
    """`(N, ..., width)` as `(N, T, width)` in float32."""
    shape = ops.shape(tensor)
    positions = 1
    for side in shape[1:-1]:
        positions = positions * side
    return ops.reshape(vectors.cast(tensor, "float32"), (shape[0], positions, width))


def stacked(values: list):
    """`W` of shape `(d_in, d_out)` from `[kernel]` or `[kernel, bias]`."""
    kernel = vectors.cast(values[0], "float32")
    if len(values) == 1:
        return kernel
    return ops.concatenate([kernel, ops.cast(values[1], "float32")[None]], axis=0)


def unstacked(matrix, has_bias: bool) -> list:
    """The inverse of `stacked`: cut the last row off as the bias."""
    return [matrix[:-1], matrix[-1]] if has_bias else [matrix]


def with_ones(rows_):
    """Append the homogeneous coordinate that carries the bias."""
    return ops.concatenate([rows_, ops.ones_like(rows_[..., :1])], axis=-1)
