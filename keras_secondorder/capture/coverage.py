"""Which curvature block each trainable variable gets, and why."""

import collections
import math
from typing import NamedTuple

import keras

from keras_secondorder.capture.chains import link_bytes, with_successors
from keras_secondorder.capture.memory import (
    FLOAT_BYTES,
    bytes_of,
    fit_to,
    machine_budget,
    sides_of,
)
from keras_secondorder.capture.recorder import count_uses
from keras_secondorder.capture.time_distributed import for_all_steps, time_distributed
from keras_secondorder.capture.wrapper import LayerWrapper, wrapper_class_of

FALLBACKS = ("diagonal", "gradient", "error")
# Layers that run the layers inside them in a loop or a vectorised map, where a tensor
# seen inside means nothing outside.
_LOOPS = (keras.layers.RNN, keras.layers.TimeDistributed)
# Layers whose weights are read by a library that knows nothing of Keras's scopes: as a
# function of its parameters, such a layer would be a constant.
_FOREIGN = (keras.layers.TorchModuleWrapper, keras.layers.TFSMLayer)


class Block(NamedTuple):
    """The part of the curvature matrix that belongs to some of the variables.

    Attributes:
        kind: "kronecker", "unitwise", "diagonal" or "gradient".
        variables: The trainable variables it covers.
        layer_name: Name of the layer they belong to.
        wrapper: The layer wrapper, for a Kronecker or unitwise block.
        reason: Why it is neither of them, else an empty string.
        sides: The form of its factors, a tuple for each affine map of the layer.
        eigenvalues: Whether it keeps the eigenvalues of `A (x) G`.
        successor: The wrapper of the layer that follows, in a block-tridiagonal chain.
    """

    kind: str
    variables: list
    layer_name: str
    wrapper: LayerWrapper | None = None
    reason: str = ""
    sides: list = ()
    eigenvalues: bool = False
    successor: LayerWrapper | None = None

    @property
    def factors(self) -> str:
        """The sizes of the factors, for people to read."""
        names = {"kronecker": "AG", "unitwise": "F"}.get(self.kind)
        if names is None:
            return "diagonal" if self.kind == "diagonal" else "identity"
        text = "; ".join(
            ", ".join(f"{n} {side}" for n, side in zip(names, part, strict=True))
            for part in self.sides
        )
        chained = self.successor is not None
        return f"{text}, to {self.successor.layer.name}" if chained else text

    @property
    def is_plain(self) -> bool:
        """Whether it is one pair of full matrices, linked to no other block."""
        if self.kind != "kronecker" or self.successor is not None:
            return False
        full = all(side.blocks * side.stack == 1 for side in self.sides[0])
        return len(self.sides) == 1 and full

    @property
    def bytes(self) -> int:
        """Memory that is kept: the running factors, their inverses or eigenbases."""
        if self.wrapper is not None:
            total = bytes_of(self.sides, self.eigenvalues)
            if self.successor is not None:
                total += link_bytes(self.wrapper, self.successor)
            return total
        if self.kind == "diagonal":
            return sum(math.prod(v.shape) for v in self.variables) * FLOAT_BYTES
        return 0

    @property
    def working_bytes(self) -> int:
        """At most what it takes besides while a step renews it.

        New factors and inverses stand beside the old ones until they are known to be
        finite, and what goes to LAPACK on the host is copied on the way there and back.
        """
        if self.successor is not None:
            return 4 * self.bytes
        return (3 if self.eigenvalues else 2) * self.bytes


def plan_blocks(
    model,
    on_unsupported: str = "diagonal",
    max_factor_size: int = 8192,
    factor_memory: int | None = None,
    eigenvalues: bool = False,
    chains: bool = False,
    rank: int | None = None,
) -> list[Block]:
    """Decide on a block for every trainable variable of a built model.

    Args:
        model: A built Keras model.
        on_unsupported: Block of the variables without a Kronecker block: "diagonal",
            "gradient", or "error" to refuse the model.
        max_factor_size: A side of a Kronecker factor larger than this is diagonal.
        factor_memory: Bytes that all factors and inverses may take; the largest are
            split into blocks until they fit. None is a quarter of the machine's memory:
            while they are renewed, a step works in up to twice as much besides.
        eigenvalues: Whether Kronecker blocks keep eigenvalues, as many as weights.
        chains: Whether dense layers that follow each other are linked.
        rank: Rank of the inverses of factors three times as large, or None.

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
    uses = count_uses(model, wrappers)
    owners = collections.Counter(id(v) for w in wrappers for v in w.variables)
    structured = {}
    for wrapper in wrappers:
        reason = _reason_against(wrapper, uses, owners)
        for v in wrapper.variables:
            structured[id(v)] = None if reason else wrapper
            reasons[id(v)] = (wrapper.layer.name, reason)

    kept = {id(w): w for w in structured.values() if w is not None}
    sides = [sides_of(w, max_factor_size, rank) for w in kept.values()]
    budget = machine_budget() if factor_memory is None else factor_memory
    if budget is not None:
        sides = fit_to(budget, sides, eigenvalues)
    sides = dict(zip(kept, sides, strict=True))

    blocks, covered = [], set()
    for v in model.trainable_variables:
        if id(v) in covered:
            continue
        wrapper = structured.get(id(v))
        if wrapper is not None:
            name = wrapper.layer.name
            shape = sides[id(wrapper)]
            block = Block(
                wrapper.kind,
                wrapper.variables,
                name,
                wrapper,
                sides=shape,
                eigenvalues=eigenvalues,
            )
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
    return with_successors(model, blocks, uses, budget) if chains else blocks


def _reason_against(wrapper, uses, owners) -> str:
    """Why a wrapped layer has no Kronecker block all the same; empty if it has."""
    if uses is not None and uses.calls[wrapper] == 0:
        return "not used in the forward pass"
    if uses is not None and any(id(v) in uses.outside for v in wrapper.variables):
        return "also used outside of its layer"
    if any(owners[id(v)] > 1 for v in wrapper.variables):
        return "shared with another layer"
    if any(0 in v.shape for v in wrapper.variables):
        return "without entries"
    return ""


def _find_wrappers(model):
    """Wrappers for the layers of a model, and reasons for the variables without."""
    wrappers, reasons, seen = [], {}, set()

    def visit(layer, against):
        # A layer that `call` never uses is not built: nothing to look at, nor to train.
        # A frozen layer may hold others that are not, and says that it has none.
        trained = [v for v in layer.weights if v.trainable]
        if id(layer) in seen or not trained:
            return
        seen.add(id(layer))
        wrapper, reason = _wrap(layer, against)
        if wrapper is not None:
            seen.add(id(wrapper.layer))
            wrappers.append(wrapper)
        else:
            if wrapper_class_of(layer) is not None:
                against = against or reason  # one that was refused
            elif isinstance(layer, _LOOPS):
                against = f"runs inside the loop of '{layer.name}'"
            elif isinstance(layer, keras.layers.SpectralNormalization):
                against = f"'{layer.name}' rewrites its kernel while training"
            for child in sublayers(layer):
                visit(child, against)
        for v in trained:
            reasons.setdefault(id(v), (layer.name, reason))

    visit(model, None)
    return wrappers, reasons


def wrapper_of(layer) -> tuple:
    """The wrapper of a built layer and an empty string, or None and why not."""
    wrapper, reason = _wrap(layer, None)
    return wrapper, "" if wrapper is not None else reason


def _wrap(layer, against: str | None):
    """The wrapper and why it leaves variables out, or None and why there is none."""
    steps = isinstance(layer, keras.layers.TimeDistributed)
    inner = layer.layer if steps else layer
    wrapper_class = time_distributed(layer) if steps else wrapper_class_of(layer)
    if against is not None:
        return None, against
    if wrapper_class is None:
        return None, f"no wrapper for {type(inner).__name__}"
    reason = wrapper_class.reason_against(inner)
    if reason:
        return None, reason
    wrapper = wrapper_class.of(inner)
    return for_all_steps(wrapper, layer) if steps else wrapper, wrapper.left_out


def sublayers(layer) -> list:
    """The layers directly inside a layer or model."""
    if isinstance(layer, keras.Model):
        return layer.layers
    # `Model.layers` reads what every Keras layer keeps of the layers inside it.
    return keras.Model.layers.fget(layer)


def check_layers(layer) -> None:
    """Refuse layers whose gradient would be zero, whatever they compute.

    Args:
        layer: A built layer or model.

    Raises:
        ValueError: There is one, with trainable weights.
    """
    for found in all_layers(layer):
        if isinstance(found, _FOREIGN) and found.trainable_variables:
            raise ValueError(
                f"The weights of '{found.name}' are read by another library than "
                "Keras, so their curvature cannot be seen. Received a "
                f"{type(found).__name__} with trainable weights. Set its "
                "`trainable = False`, or write it with Keras layers."
            )


def has_foreign_layers(layer) -> bool:
    """Whether another library computes a layer, or one inside it."""
    return any(isinstance(found, _FOREIGN) for found in all_layers(layer))


def all_layers(layer):
    """A layer or model and all layers inside it, one after the other."""
    yield layer
    for child in sublayers(layer):
        yield from all_layers(child)


def is_built(layer) -> bool:
    """Whether a layer and all layers inside it are built.

    `Model.build` marks a subclassed model as built, whatever its layers are.
    """
    return all(found.built for found in all_layers(layer))


def places_of(blocks: list[Block], model) -> list[list[int]]:
    """For each block, the indices of its variables among the trainable ones.

    Args:
        blocks: Some blocks of a plan.
        model: The model that they were planned for.
    """
    index = {id(v): i for i, v in enumerate(model.trainable_variables)}
    return [[index[id(v)] for v in block.variables] for block in blocks]


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
    kept = sum(block.bytes for block in blocks)
    more = sum(block.working_bytes for block in blocks)
    summary = f"curvature memory: {kept:,} bytes, {more:,} more while it is renewed"
    return "\n".join([*text, summary])
