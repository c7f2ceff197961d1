"""Print the table of `layers.md`: the block of every layer with trainable weights.

    KERAS_BACKEND=jax python docs/layer_table.py

The table is the same on all three backends; a test compares it with the page. Layers
that wrap a function of another library are left out: each exists on one backend.
"""

import inspect
import re

import keras
from keras import layers

from keras_secondorder.capture import FALLBACKS, plan_blocks

SEQUENCE, IMAGE = (4, 3), (4, 4, 3)


def example(cls) -> keras.Model | None:
    """A small model around one layer of a class, or None if it has no weights."""
    name = cls.__name__
    rank = next((r for r in (1, 2, 3) if f"{r}D" in name), None)
    shape = {None: SEQUENCE, 1: SEQUENCE, 2: IMAGE, 3: (2, *IMAGE)}[rank]
    x = keras.Input(shape)
    if name in ("Embedding", "ReversibleEmbedding"):
        layer, x = cls(5, 3), keras.Input((4,), dtype="int32")
        h = layer(x)
        return keras.Model(x, layer(h, reverse=True) if "Rev" in name else h)
    if "Attention" in name:
        arguments = {"MultiHeadAttention": (2, 3), "GroupedQueryAttention": (3, 2, 1)}
        layer = cls(*arguments.get(name, (True,)))
        inputs = (x, x) if name in arguments else ([x, x],)
        return keras.Model(x, layer(*inputs))
    if name.endswith(("Cell", "Cells")):
        x, cell = keras.Input((3,)), layers.GRUCell(2)
        cell = cls([cell]) if name == "StackedRNNCells" else cls(2)
        sizes = cell.state_size
        sizes = sizes if isinstance(sizes, list | tuple) else [sizes]
        states = [x[:, :size] for size in sizes]
        return keras.Model(x, cell(x, states)[0])
    if "ConvLSTM" in name:
        x = keras.Input((2, *shape))
    if name == "STFTSpectrogram":
        x = keras.Input((32, 1))
    build = {
        "Bidirectional": lambda: cls(layers.LSTM(2)),
        "Dense": lambda: cls(2),
        "EinsumDense": lambda: cls("abc,cd->abd", (None, 2), bias_axes="d"),
        "GroupNormalization": lambda: cls(3),
        "RNN": lambda: cls(layers.GRUCell(2)),
        "STFTSpectrogram": lambda: cls(frame_length=8),
        "SpectralNormalization": lambda: cls(layers.Dense(2)),
        "TimeDistributed": lambda: cls(layers.Dense(2)),
    }.get(name)
    if build is None and "Depthwise" in name:
        build = lambda: cls(2)  # noqa: E731
    elif build is None and "Conv" in name:
        build = lambda: cls(2, 2)  # noqa: E731
    elif build is None and name in ("SimpleRNN", "LSTM", "GRU"):
        build = lambda: cls(2)  # noqa: E731
    elif build is None:
        build = cls
    try:
        layer = build()
        model = keras.Model(x, layer(x))
    except (TypeError, ValueError, ImportError, AttributeError):
        return None  # takes other inputs, and none of these has trainable weights
    return model if model.trainable_variables else None


def classes() -> dict:
    """Layer classes by name, without abstract ones and without aliases."""
    found = {}
    for _, cls in inspect.getmembers(layers, inspect.isclass):
        if issubclass(cls, layers.Layer) and cls not in (layers.Layer, layers.Wrapper):
            found[cls.__name__] = cls
    return dict(sorted(found.items()))


def table() -> list[tuple]:
    """Rows `(layer, block, factors or reason)`, cells of the loops left out."""
    rows = []
    for name, cls in classes().items():
        model = example(cls)
        if model is None:
            continue
        blocks = plan_blocks(model)
        kinds = "/".join(dict.fromkeys(b.kind for b in blocks))
        fell_back = [b.reason for b in blocks if b.kind in FALLBACKS]
        if fell_back:
            rows.append(
                (name, f"{kinds} (fallback)", re.sub(r"_\d+'", "'", fell_back[0]))
            )
        else:
            form = "; ".join(dict.fromkeys(b.factors for b in blocks))
            rows.append((name, kinds, form))
    return rows


def markdown(rows: list[tuple]) -> str:
    """The table as it stands in `layers.md`."""
    lines = ["| Layer | Block | Factors of a small one, or why |", "|---|---|---|"]
    lines += [f"| `{name}` | {block} | {form} |" for name, block, form in rows]
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown(table()))
