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
    if uses is None:
        return blocks
    plain = {id(b.wrapper.layer): b for b in blocks if _is_plain(b, uses)}
    graph = _Graph(model)
    left = None if budget is None else budget - sum(b.bytes for b in blocks)
    linked = []
    for block in blocks:
        follower = None
        if id(block.wrapper and block.wrapper.layer) in plain:
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


def _is_plain(block, uses) -> bool:
    """Whether a block is one pair of full factors, of one call with one position."""
    return (
        type(block.wrapper) is DenseWrapper
        and uses.calls[block.wrapper] == 1
        and uses.ranks[block.wrapper] == 2
        and block.is_plain
    )


class _Graph:
    """Who takes the output of each layer of a model.

    Sequential models say it by the order of their layers, functional ones by their
    config, which has all calls of each layer in this model and in no other. Nested
    models are gone through where they have one input.
    """

    def __init__(self, model):
        self._takers = collections.defaultdict(list)  # by tensor
        self._outputs = collections.defaultdict(list)  # by layer, one for each call
        for tensor in self._walk(model) or ():
            self._takers[tensor].append(None)  # the loss

    def next_layer(self, layer, wanted: dict):
        """The only layer of `wanted`, by id, that a layer's output reaches; or None."""
        while True:
            outputs = self._outputs[id(layer)]
            takers = self._takers[outputs[0], 0] if len(outputs) == 1 else []
            layer = takers[0] if len(takers) == 1 else None
            if layer is None or id(layer) in wanted:
                return layer
            if not isinstance(layer, PASSING):
                return None

    def _walk(self, model, inputs=None) -> list | None:
        """The outputs of a model, or None where it does not say how it is made."""
        if isinstance(model, keras.Sequential):
            (tensor,) = inputs or [object()]
            for layer in model.layers:
                tensor = self._call(layer, [tensor])(0)
            return [tensor]
        config = _functional_config(model)
        if config is None:
            return None
        starts = _histories(config["input_layers"])
        inputs = inputs or [object() for _ in starts]
        known = {
            t[:2]: [tensor].__getitem__
            for t, tensor in zip(starts, inputs, strict=True)
        }
        layers = {layer.name: layer for layer in model.operations}
        waiting = _calls(config, layers)
        while waiting:
            call = next(c for c in waiting if all(t[:2] in known for t in c[1]))
            waiting.remove(call)
            (name, number), arguments = call
            tensors = [known[t[:2]](t[2]) for t in arguments]
            known[name, number] = self._call(layers[name], tensors)
        return [known[t[:2]](t[2]) for t in _histories(config["output_layers"])]

    def _call(self, layer, tensors: list):
        """A function from a number to that output of a layer."""
        if isinstance(layer, keras.Model) and len(tensors) == 1:
            outputs = self._walk(layer, tensors)
            if outputs is not None:
                return outputs.__getitem__
        for tensor in tensors:
            self._takers[tensor].append(layer)
        call = object()
        self._outputs[id(layer)].append(call)
        return lambda k: (call, k)


def _functional_config(model) -> dict | None:
    """The config of a functional model, or None for another or where it has none."""
    if not hasattr(model, "operations"):
        return None
    try:
        config = model.get_config()
    except NotImplementedError:  # a layer of the user's that cannot be saved
        return None
    return config if "input_layers" in config else None


def _calls(config: dict, layers: dict) -> list:
    """`((layer's name, number of its call), its tensors)` of a functional model."""
    calls = []
    for layer in config["layers"]:
        # Keras counts the making of a functional model as its first call.
        first = int(hasattr(layers[layer["name"]], "operations"))
        for number, node in enumerate(layer["inbound_nodes"], start=first):
            tensors = _tensors_in([node["args"], node["kwargs"]])
            calls.append(((layer["name"], number), tensors))
    return calls


def _tensors_in(tree) -> list:
    """Where the tensors in a call's arguments come from: (name, call, output)."""
    if isinstance(tree, dict):
        if tree.get("class_name") == "__keras_tensor__":
            return [tuple(tree["config"]["keras_history"])]
        tree = list(tree.values())
    if not isinstance(tree, list | tuple):
        return []
    return [tensor for item in tree for tensor in _tensors_in(item)]


def _histories(tree) -> list:
    """All (name, call, output) in a list or dictionary of them."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    if tree and isinstance(tree[0], str):
        return [tuple(tree)]
    return [history for item in tree for history in _histories(item)]
