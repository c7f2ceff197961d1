"""Layers and their blocks as dense matrices."""

import keras
import numpy as np
from keras import ops

from keras_secondorder import autodiff, vectors


def jacobian(layer, x):
    """All outputs by all trainable variables: `(outputs, parameters)`, float64."""
    parameters = layer.trainable_variables

    def forward(values, tap):
        with keras.StatelessScope(list(zip(parameters, values, strict=True))):
            return [layer(ops.convert_to_tensor(x))], ()

    with autodiff.no_grad():
        linear = autodiff.vjp(forward, vectors.values(parameters), taps=False)
        pullback = autodiff.compiled(linear.pullback)
        shape = linear.outputs[0].shape
        rows = []
        for k in range(int(np.prod(shape))):
            one_hot = np.zeros(shape, "float32")
            one_hot.flat[k] = 1.0
            rows.append(pullback([ops.convert_to_tensor(one_hot)]))
    return np.stack(
        [np.concatenate([numpy(g).ravel() for g in row]) for row in rows]
    ).astype(float)


def numpy(tensor):
    return np.array(ops.convert_to_numpy(tensor))


def positions_of(block, variables):
    """For each matrix of each map, the places of its entries among all parameters."""
    starts = np.cumsum([0, *(int(np.prod(v.shape)) for v in variables)])
    places = {
        id(v): np.arange(a, b, dtype="float32").reshape(tuple(v.shape))
        for v, a, b in zip(variables, starts, starts[1:], strict=False)
    }
    values = [ops.convert_to_tensor(places[id(v)]) for v in block.variables]
    if block.wrapper.kind == "unitwise":
        flat = np.stack([numpy(v).ravel() for v in values], axis=-1)
        return [list(flat.astype(int))]
    result = []
    for part, mine in zip(block.parts, block.wrapper.split(values), strict=True):
        matrices = numpy(part.to_matrix(mine)).astype(int)
        result.append([m.ravel() for m in matrices.reshape(part.stack, -1)])
    return result


def dense_factor(factor, side, index):
    """Matrix number `index` of a factor, written out."""
    blocks = factor.reshape(side.stack, side.blocks, side.width, side.width)[index]
    full = np.zeros((side.blocks * side.width,) * 2)
    for i, block in enumerate(blocks):
        at = slice(i * side.width, (i + 1) * side.width)
        full[at, at] = block
    return full[: side.size, : side.size]
