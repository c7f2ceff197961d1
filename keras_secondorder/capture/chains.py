"""Which dense layers of a model follow each other directly."""

import collections

import keras

from keras_secondorder.capture.dense import DenseWrapper
from keras_secondorder.capture.memory import FLOAT_BYTES

# Layers that hand every number on by itself, changed or not.
PASSING = (
    keras.layers.Activation,
    keras.layers.ActivityRegularization,
    keras.layers.AlphaDropout,
    keras.layers.Dropout,
    keras.layers.ELU,
    keras.layers.Flatten,
    keras.layers.GaussianDropout,
    keras.layers.GaussianNoise,
    keras.layers.Identity,
    keras.layers.LeakyReLU,
    keras.layers.ReLU,
    keras.layers.Reshape,
)


def with_successors(model, blocks: list, uses, budget: int | None) -> list:
    """Link the blocks of dense layers that follow each other.

    A block gets a `successor` where its layer's output goes to one other dense layer
    and nowhere else, at most through layers that act on each number alone. Both have
    one position, one call and full factors. Links are made in the order of the model
    while they fit in what the blocks leave of the budget.

    Args:
        model: A built Keras model. Links are found in Sequential and functional models,
            nested ones included, not in a model with a `call` of its own.
        blocks: The plan of its blocks.
        uses: What `count_uses` found, or None.
        budget: Bytes for all factors and inverses, or None.

    Returns:
        The blocks, some of them with a `successor`.
    """
    if uses is None or not getattr(model, "outputs", None):
        return blocks
    graph = _Graph(model)
    plain = {id(b.wrapper.layer): b for b in blocks if _is_plain(b, uses, graph)}
    left = None if budget is None else budget - sum(b.bytes for b in blocks)
    linked = []
    for block in blocks:
        follower = None
        if block.wrapper is not None and id(block.wrapper.layer) in plain:
            follower = plain.get(id(graph.next_layer(block.wrapper.layer, plain)))
        if follower is not None:
            joined = block._replace(successor=follower.wrapper)
            cost = joined.bytes - block.bytes
            if left is None or cost <= left:
                block, left = joined, None if left is None else left - cost
        linked.append(block)
    return linked


def link_bytes(wrapper, successor) -> int:
    """Memory of what belongs to two neighbours: both moments, both Psi, eigenvalues."""
    pairs = wrapper.d_in * successor.d_in + wrapper.d_out * successor.d_out
    return (2 * pairs + wrapper.d_in + wrapper.d_out) * FLOAT_BYTES


def _is_plain(block, uses, graph) -> bool:
    wrapper = block.wrapper
    return (
        type(wrapper) is DenseWrapper
        and uses.calls[wrapper] == 1
        and all(side.blocks * side.stack == 1 for side in block.sides[0])
        and graph.input_rank(wrapper.layer) == 2
    )


class _Graph:
    """The layers behind a model's outputs, and who takes the output of each.

    Read from the symbolic tensors that a layer got and gave when the model was made.
    A layer that was called several times shows the first call only: what follows the
    others is not found, and ends a chain.
    """

    def __init__(self, model):
        self._producers, self._same = {}, {}
        self._register(model)
        self._takers = collections.defaultdict(list)
        self._inputs = {}
        waiting = [self._resolve(t) for t in model.outputs]
        for tensor in waiting:
            self._takers[id(tensor)].append(None)  # the loss
        while waiting:
            layer = self._producers.get(id(waiting.pop()))
            if layer is None or id(layer) in self._inputs:
                continue
            inputs = [self._resolve(t) for t in keras.tree.flatten(layer.input)]
            self._inputs[id(layer)] = inputs
            for tensor in inputs:
                self._takers[id(tensor)].append(layer)
            waiting += inputs

    def _register(self, model):
        for layer in getattr(model, "operations", model.layers):
            if not hasattr(layer, "output"):
                continue  # never called on symbolic tensors
            outputs = keras.tree.flatten(layer.output)
            if isinstance(layer, keras.Model) and getattr(layer, "outputs", None):
                # A nested model: its own tensors stand for those around it.
                inputs = keras.tree.flatten(layer.input)
                pairs = [*zip(outputs, layer.outputs, strict=True)]
                pairs += zip(layer.inputs, inputs, strict=True)
                self._same.update({id(a): b for a, b in pairs if a is not b})
                self._register(layer)
            else:
                self._producers.update({id(t): layer for t in outputs})

    def _resolve(self, tensor):
        while id(tensor) in self._same:
            tensor = self._same[id(tensor)]
        return tensor

    def input_rank(self, layer) -> int | None:
        """Number of axes of a layer's only input; None for others."""
        inputs = self._inputs.get(id(layer), [])
        return len(inputs[0].shape) if len(inputs) == 1 else None

    def next_layer(self, layer, wanted: dict):
        """The only layer of `wanted`, by id, that a layer's output reaches; or None."""
        while True:
            takers = self._takers[id(self._resolve(layer.output))]
            layer = takers[0] if len(takers) == 1 else None
            if layer is None or id(layer) in wanted:
                return layer
            if not isinstance(layer, PASSING):
                return None
