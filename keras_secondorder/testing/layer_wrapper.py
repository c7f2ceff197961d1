"""What a layer wrapper must do, checked on one layer and one batch."""

import keras
import numpy as np
from keras import ops

from keras_secondorder import autodiff, vectors
from keras_secondorder.capture import of_wrapper, recording, wrapper_of

REPEATS = 3  # random cotangents; the identity is linear, so one wrong entry shows
# Sums of at most some hundred float32 products, next to the largest entry.
RTOL = 2e-5


def check_layer_wrapper(layer, inputs, **call_arguments) -> None:
    """Check the wrapper registered for a layer's class.

    ```
    to_matrix(dL/dtheta) = sum over examples n and positions t of a_nt g_nt^T
    ```

    for random cotangents of the layer's output, where `a` are the rows that the
    wrapper gives and the left side is the gradient by the backend's autodiff. Also:
    watching the layer changes neither its output nor the layer; `from_matrix` undoes
    `to_matrix`; the rows have float32 entries and the sizes that the wrapper states;
    each example's rows depend on that example's input alone.

    Args:
        layer: A layer. It is called on the inputs once, and so built.
        inputs: Inputs of two examples at least, an array.
        **call_arguments: Further arguments of the call, such as `training`; arrays
            among them have one entry for each example, such as `mask`.

    Raises:
        AssertionError: The wrapper is wrong, or there is none; the message says where.

    Example:
        >>> import keras, numpy as np
        >>> from keras_secondorder.testing import check_layer_wrapper
        >>> check_layer_wrapper(keras.layers.Dense(3), np.ones((2, 4), "float32"))
    """
    inputs = ops.convert_to_tensor(inputs)
    plain = _numpy(layer(inputs, **call_arguments))
    wrapper, reason = wrapper_of(layer)
    assert wrapper is not None, f"{type(layer).__name__} has no wrapper: {reason}."
    before = dict(vars(layer))
    watched, seen, pulled = _watched(layer, wrapper, inputs, REPEATS, call_arguments)
    close(_numpy(watched), plain, "the output while the layer is watched")
    for gradient, taps in pulled:
        _check_gradient(layer, wrapper, seen, gradient, taps)
    after = dict(vars(layer))
    changed = {n for n in {*before, *after} if before.get(n) is not after.get(n)}
    assert not changed, f"`record` left these attributes changed: {sorted(changed)}."
    _check_layout(wrapper)
    _check_examples(layer, wrapper, inputs, call_arguments, seen)


def _watched(layer, wrapper, inputs, repeats, call_arguments):
    """The output, what was recorded, and `(gradient, taps)` for each cotangent."""
    parameters = layer.trainable_variables

    @autodiff.compiled
    def compute(values, inputs):
        def forward(values, tap):
            scope = zip(parameters, values, strict=True)
            with keras.StatelessScope(list(scope)):
                with recording([wrapper], tap) as seen:
                    outputs = layer(inputs, **call_arguments)
                return [ops.cast(outputs, "float32")], dict(seen)

        linear = autodiff.vjp(forward, values)
        (output,) = linear.outputs
        pulled = []
        for seed in range(repeats):
            cotangent = np.random.default_rng(seed).normal(size=tuple(output.shape))
            cotangent = ops.convert_to_tensor(cotangent.astype("float32"))
            pulled.append(linear.pullback_all([cotangent]))
        return output, linear.aux, pulled

    with autodiff.no_grad():
        return compute(vectors.values(parameters), inputs)


def _check_gradient(layer, wrapper, seen, gradient, taps):
    places = {
        id(v): g for v, g in zip(layer.trainable_variables, gradient, strict=True)
    }
    gradient = [places[id(v)] for v in wrapper.variables]
    inputs, taps = seen[0], of_wrapper(taps, 0)
    assert len(inputs) == len(taps) == 1, (
        f"`record` called `on_input` {len(inputs)} times and `on_preactivation` "
        f"{len(taps)} times in one call of the layer; it must call each once."
    )
    if wrapper.kind == "unitwise":
        total = _numpy(wrapper.parameter_gradients(inputs[0], taps[0])).sum((1, 2))
        for v, expected, ours in zip(wrapper.variables, gradient, total, strict=True):
            close(ours, _numpy(expected).ravel(), f"the gradient of {v.name}")
        return
    for i, values in enumerate(wrapper.split(gradient)):
        part, what = wrapper.parts[i], f"a^T g of affine map {i}"
        a, g = part.input_rows(inputs[0]), part.gradient_rows(taps[0])
        W = _numpy(part.to_matrix(values))
        a, g = dense_rows(part, a), _numpy(g)
        assert a.dtype == g.dtype == np.float32, f"{what}: rows must be float32."
        assert a.shape[:-1] == g.shape[:-1], f"{what}: {a.shape} and {g.shape}."
        sizes, stated = (a.shape[-1], g.shape[-1]), (part.d_in, part.d_out)
        assert sizes == stated, (
            f"{what}: {sizes} features, `d_in`, `d_out` say {stated}."
        )
        close(np.einsum("...nti,...ntj->...ij", a, g), W, what)


def dense_rows(part, rows) -> np.ndarray:
    """Input rows as an array `(..., N, T, d_in)`, one-hot rows written out."""
    rows = _numpy(rows)
    return np.eye(part.d_in, dtype="float32")[rows] if part.one_hot else rows


def _check_layout(wrapper):
    shapes = [tuple(v.shape) for v in wrapper.variables]
    values = [np.arange(np.prod(s), dtype="float32").reshape(s) for s in shapes]
    if wrapper.kind == "unitwise":
        sizes = {v.size for v in values}
        assert sizes == {wrapper.stack}, f"`stack` is {wrapper.stack}, not {sizes}."
        return
    parts = wrapper.split([ops.convert_to_tensor(v) for v in values])
    matrices = [p.to_matrix(v) for p, v in zip(wrapper.parts, parts, strict=True)]
    for part, matrix in zip(wrapper.parts, matrices, strict=True):
        lead = () if part.stack == 1 else (part.stack,)
        stated = (*lead, part.d_in, part.d_out)
        assert tuple(matrix.shape) == stated, f"W is {matrix.shape}, stated {stated}."
    back = wrapper.join(
        [p.from_matrix(m) for p, m in zip(wrapper.parts, matrices, strict=True)]
    )
    for ours, expected in zip(back, values, strict=True):
        close(_numpy(ours), expected, "`from_matrix` after `to_matrix`", rtol=0.0)


def _check_examples(layer, wrapper, inputs, call_arguments, seen):
    """The rows of the first example, on its own and in the batch."""
    if wrapper.kind == "unitwise":  # batch normalisation mixes examples
        return
    first = {
        name: value[:1] if hasattr(value, "shape") else value
        for name, value in call_arguments.items()
    }
    (alone,) = _watched(layer, wrapper, inputs[:1], 0, first)[1][0]
    (together,) = seen[0]
    for part in wrapper.parts:
        one, all_ = (dense_rows(part, part.input_rows(x)) for x in (alone, together))
        first = all_.reshape(*all_.shape[:-3], len(inputs), -1, all_.shape[-1])
        one = one.reshape(*one.shape[:-3], 1, -1, one.shape[-1])
        close(one, first[..., :1, :, :], "the rows of an example on its own")


def close(ours, expected, what: str, rtol: float = RTOL) -> None:
    """Assert that arrays agree, next to the largest entry of the second.

    Args:
        ours: Array.
        expected: Array of the same shape.
        what: What they are, for the message.
        rtol: Tolerance.
    """
    assert ours.shape == expected.shape, f"{what}: {ours.shape}, not {expected.shape}."
    error = np.abs(ours - expected).max(initial=0.0)
    largest = np.abs(expected).max(initial=0.0)
    assert error <= rtol * largest, f"{what}: off by {error:.3g} of {largest:.3g}."


def _numpy(tensor) -> np.ndarray:
    return np.array(ops.convert_to_numpy(tensor))
