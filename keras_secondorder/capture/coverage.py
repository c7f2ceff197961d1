"""Which curvature block each trainable variable gets, and why."""

import collections
import math
from typing import NamedTuple

import keras

from keras_secondorder.capture.dense import DenseWrapper, TimeDistributedDenseWrapper
from keras_secondorder.capture.recorder import count_calls
from keras_secondorder.capture.wrapper import LayerWrapper, wrapper_class_of

FALLBACKS = ("diagonal", "gradient", "error")
# Layers that run the layers inside them in a loop or a vectorised map, where a tensor
# seen inside means nothing outside.
_LOOPS = (keras.layers.RNN, keras.layers.TimeDistributed, keras.layers.Bidirectional)
_FLOAT_BYTES = 4


class Block(NamedTuple):
    """The part of the curvature matrix that belongs to some of the variables.

    Attributes:
        kind: "kronecker", "diagonal" or "gradient".
        variables: The trainable variables it covers.
        layer_name: Name of the layer they belong to.
        wrapper: The layer wrapper, for a Kronecker block.
        reason: Why it is not a Kronecker block, else an empty string.
    """

    kind: str
    variables: list
    layer_name: str
    wrapper: LayerWrapper | None = None
    reason: str = ""

    @property
    def factors(self) -> str:
        """The sizes of the factors, for people to read."""
        if self.kind == "kronecker":
            d_in, d_out = self.wrapper.d_in, self.wrapper.d_out
            return f"A {d_in} x {d_in}, G {d_out} x {d_out}"
        return "diagonal" if self.kind == "diagonal" else "identity"

    @property
    def bytes(self) -> int:
        """Memory of the running factors and of their inverses."""
        if self.kind == "kronecker":
            sides = self.wrapper.d_in**2 + self.wrapper.d_out**2
            return 2 * sides * _FLOAT_BYTES
        if self.kind == "diagonal":
            return sum(math.prod(v.shape) for v in self.variables) * _FLOAT_BYTES
        return 0


def plan_blocks(
    model, on_unsupported: str = "diagonal", max_factor_size: int = 8192
) -> list[Block]:
    """Decide on a block for every trainable variable of a built model.

    Args:
        model: A built Keras model.
        on_unsupported: Block of the variables without a Kronecker block: "diagonal",
            "gradient", or "error" to refuse the model.
        max_factor_size: The largest side that a Kronecker factor may have.

    Returns:
        Blocks that cover every trainable variable once, in the order of the model.

    Raises:
        ValueError: `on_unsupported="error"`, and a variable has no Kronecker block.
    """
    if on_unsupported not in FALLBACKS:
        raise ValueError(
            f"`on_unsupported` must be one of {FALLBACKS}. "
            f"Received on_unsupported={on_unsupported!r}."
        )
    wrappers, reasons = _find_wrappers(model)
    calls = count_calls(model, wrappers)
    owners = collections.Counter(id(v) for w in wrappers for v in w.variables)
    structured = {}
    for wrapper in wrappers:
        reason = _reason_against(wrapper, calls, owners, max_factor_size)
        for v in wrapper.variables:
            structured[id(v)] = None if reason else wrapper
            reasons[id(v)] = (wrapper.layer.name, reason)

    blocks, covered = [], set()
    for v in model.trainable_variables:
        if id(v) in covered:
            continue
        wrapper = structured.get(id(v))
        if wrapper is not None:
            block = Block("kronecker", wrapper.variables, wrapper.layer.name, wrapper)
        else:
            layer_name, reason = reasons.get(
                id(v), (v.path.split("/")[0], "no wrapper")
            )
            block = Block(on_unsupported, [v], layer_name, reason=reason)
        covered.update(id(u) for u in block.variables)
        blocks.append(block)
    if on_unsupported == "error":
        refused = [b for b in blocks if b.kind == "error"]
        if refused:
            names = ", ".join(f"{b.variables[0].path} ({b.reason})" for b in refused)
            raise ValueError(
                f"No Kronecker block for: {names}. Received on_unsupported='error'. "
                "Use on_unsupported='diagonal' to train these with a diagonal block."
            )
    return blocks


def _reason_against(wrapper, calls, owners, max_factor_size) -> str:
    """Why a wrapped layer has no Kronecker block all the same; empty if it has."""
    count = 1 if calls is None else calls[wrapper]
    side = max(wrapper.d_in, wrapper.d_out)
    if count == 0:
        return "not used in the forward pass"
    if count > 1:
        return f"called {count} times in one forward pass"
    if any(owners[id(v)] > 1 for v in wrapper.variables):
        return "shared with another layer"
    if side > max_factor_size:
        return f"a factor would be {side} x {side}, over max_factor_size"
    return ""


def _find_wrappers(model):
    """Wrappers for the layers of a model, and reasons for the variables without."""
    wrappers, reasons, seen = [], {}, set()

    def visit(layer, loop):
        if id(layer) in seen:
            return
        seen.add(id(layer))
        wrapper, reason = _wrap(layer, loop)
        if wrapper is not None:
            seen.add(id(wrapper.layer))
            wrappers.append(wrapper)
        else:
            inner_loop = layer.name if isinstance(layer, _LOOPS) else loop
            for child in _sublayers(layer):
                visit(child, inner_loop)
        for v in layer.trainable_variables:
            reasons.setdefault(id(v), (layer.name, reason))

    visit(model, None)
    return wrappers, reasons


def _wrap(layer, loop: str | None):
    """`(wrapper, "")`, or `(None, reason)` where the layer cannot be wrapped."""
    inner = layer.layer if isinstance(layer, keras.layers.TimeDistributed) else None
    wrapper_class = wrapper_class_of(inner or layer)
    if inner is not None and wrapper_class is DenseWrapper:
        wrapper_class = TimeDistributedDenseWrapper
    elif inner is not None:
        wrapper_class = None
    if wrapper_class is None:
        return None, f"no wrapper for {type(layer).__name__}"
    if loop is not None:
        return None, f"runs inside the loop of '{loop}'"
    reason = wrapper_class.reason_against(inner or layer)
    return (None, reason) if reason else (wrapper_class(layer), "")


def _sublayers(layer) -> list:
    if isinstance(layer, keras.Model):
        return layer.layers
    # `Model.layers` reads what every Keras layer keeps of the layers inside it.
    return keras.Model.layers.fget(layer)


def is_built(layer) -> bool:
    """Whether a layer and all layers inside it are built.

    `Model.build` marks a subclassed model as built, whatever its layers are.
    """
    return layer.built and all(is_built(child) for child in _sublayers(layer))


class Coverage(list):
    """The blocks of a model, a list of `Block` that shows itself as a table."""

    def __repr__(self):
        return table(self)


def table(blocks: list[Block]) -> str:
    """One line for each variable: layer, variable, block, factors, bytes, reason."""
    lines = [("layer", "variable", "shape", "block", "factors", "bytes", "why")]
    for block in blocks:
        for i, v in enumerate(block.variables):
            shared = ["as above", ""] if i else [block.factors, f"{block.bytes:,}"]
            shape = " x ".join(map(str, v.shape))
            lines.append(
                (block.layer_name, v.name, shape, block.kind, *shared, block.reason)
            )
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = [
        "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    total = sum(block.bytes for block in blocks)
    return "\n".join([*text, f"curvature memory: {total:,} bytes"])
