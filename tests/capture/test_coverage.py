"""The plan of blocks: which variable gets which, why, and how much memory."""

import keras
import numpy as np
import pytest
from keras import layers

import keras_secondorder as kso
from keras_secondorder.capture import plan_blocks, table


def by_path(model, **kwargs):
    """`{variable path: block}`, each trainable variable exactly once."""
    blocks = plan_blocks(model, **kwargs)
    covered = [v.path for block in blocks for v in block.variables]
    assert covered == [v.path for v in model.trainable_variables]
    return {v.path: block for block in blocks for v in block.variables}


def sequential(shape, *stack):
    return keras.Sequential([keras.Input(shape), *stack])


def reasons(model, **kwargs):
    return {path: block.reason for path, block in by_path(model, **kwargs).items()}


def test_dense_with_and_without_a_bias():
    model = sequential(
        (6,), layers.Dense(4, name="with_"), layers.Dense(3, use_bias=False, name="no")
    )
    with_bias, _, without = by_path(model).values()
    assert (with_bias.wrapper.d_in, with_bias.wrapper.d_out) == (7, 4)
    assert (without.wrapper.d_in, without.wrapper.d_out) == (4, 3)
    # Two running factors and two inverses of four bytes an entry.
    assert with_bias.bytes == 2 * 4 * (7**2 + 4**2)
    assert without.bytes == 2 * 4 * (4**2 + 3**2)


def test_r16_frozen_variables_have_no_block():
    model = sequential((6,), layers.Dense(4), layers.Dense(3))
    frozen, half = model.layers
    frozen.trainable = False
    half.bias.trainable = False
    (block,) = by_path(model).values()
    assert block.variables == [half.kernel]
    assert block.wrapper.d_in == 4


def test_frozen_kernel_is_named():
    model = sequential((6,), layers.Dense(4))
    model.layers[0].kernel.trainable = False
    (block,) = by_path(model).values()
    assert (block.kind, block.reason) == ("diagonal", "its kernel is frozen")


def test_r16_lora_is_named():
    model = sequential((6,), layers.Dense(4), layers.Dense(3))
    model.layers[0].enable_lora(2)
    found = reasons(model)
    assert list(found.values()) == ["LoRA is enabled"] * 3 + ["", ""]


def test_r14_shared_layers_are_counted():
    x = keras.Input((6,))
    dense, inner = layers.Dense(6), keras.Sequential([layers.Dense(6)])
    model = keras.Model(x, dense(inner(dense(inner(inner(x))))))
    assert list(reasons(model).values()) == [
        "called 3 times in one forward pass",
        "called 3 times in one forward pass",
        "called 2 times in one forward pass",
        "called 2 times in one forward pass",
    ]


def test_r16_layer_outside_the_forward_pass_is_named():
    class Unused(keras.Model):
        def __init__(self):
            super().__init__(name="whole")
            self.used = layers.Dense(3, name="used")
            self.spare = layers.Dense(2, name="spare")
            self.spare.build((None, 6))

        def call(self, x):
            return self.used(x)

    model = Unused()
    model(np.zeros((1, 6), "float32"))
    found = reasons(model)
    spare = {path: why for path, why in found.items() if "spare" in path}
    assert list(spare.values()) == ["not used in the forward pass"] * 2
    assert len(found) == 4


def test_subclass_with_its_own_call_is_not_taken_for_a_dense_layer():
    class Doubled(layers.Dense):
        def call(self, x):
            return 2.0 * super().call(x)

    class Renamed(layers.Dense):
        pass

    model = sequential((6,), Doubled(4), Renamed(3))
    assert list(reasons(model).values()) == ["no wrapper for Doubled"] * 2 + ["", ""]


def test_layers_inside_loops():
    model = sequential(
        (5, 6),
        layers.TimeDistributed(layers.Dense(4), name="steps"),
        layers.TimeDistributed(keras.Sequential([layers.Dense(4)]), name="nested"),
        layers.GRU(3, name="gru"),
    )
    found = by_path(model)
    kinds = [(block.kind, block.reason) for block in found.values()]
    assert kinds[:2] == [("kronecker", "")] * 2
    assert kinds[2:4] == [("diagonal", "runs inside the loop of 'nested'")] * 2
    assert {kind for kind, _ in kinds[4:]} == {"diagonal"}


def test_r18_no_big_factor():
    ids, wide = keras.Input((1,), dtype="int32"), keras.Input((20_000,))
    embedded = layers.Flatten()(layers.Embedding(50_000, 64)(ids))
    outputs = layers.Concatenate()([embedded, layers.Dense(8)(wide)])
    model = keras.Model([ids, wide], layers.Dense(2)(outputs))
    embedding, kernel, bias, last, _ = (
        (block.kind, block.bytes) for block in by_path(model).values()
    )
    assert embedding == ("diagonal", 4 * 50_000 * 64)
    assert kernel == ("diagonal", 4 * 20_000 * 8)
    assert bias == ("diagonal", 4 * 8)
    assert last[0] == "kronecker"
    text = table(plan_blocks(model))
    for part in ("12,800,000", "640,000", "20001 x 20001, over max_factor_size"):
        assert part in text
    total = 4 * (50_000 * 64 + 20_000 * 8 + 8) + last[1]
    assert text.endswith(f"curvature memory: {total:,} bytes")
    # What the table says is what the optimizer takes.
    model.compile(optimizer=kso.KFAC(), loss="mse")
    sizes = [4 * int(np.prod(v.shape)) for v in model.optimizer.variables]
    assert max(sizes) == 4 * 50_000 * 64
    parameters = 4 * model.count_params()
    assert total + parameters <= sum(sizes) <= total + parameters + 100


def test_max_factor_size():
    model = sequential((6,), layers.Dense(4), layers.Dense(3))
    assert {b.kind for b in by_path(model, max_factor_size=7).values()} == {"kronecker"}
    kinds = [b.kind for b in by_path(model, max_factor_size=6).values()]
    assert kinds == ["diagonal"] * 2 + ["kronecker"] * 2


def test_on_unsupported():
    model = sequential((4, 4, 1), layers.Conv2D(2, 3, name="conv"), layers.Flatten())
    model.add(layers.Dense(2))
    for choice, size in (("diagonal", 4 * 18), ("gradient", 0)):
        kernel, *_ = by_path(model, on_unsupported=choice).values()
        assert (kernel.kind, kernel.bytes) == (choice, size)
        assert kernel.reason == "no wrapper for Conv2D"
    message = r"conv/kernel \(no wrapper for Conv2D\).*on_unsupported='diagonal'"
    with pytest.raises(ValueError, match=message):
        plan_blocks(model, on_unsupported="error")
    with pytest.raises(ValueError, match="conv/kernel"):
        model.compile(optimizer=kso.KFAC(on_unsupported="error"), loss="mse")
    dense = sequential((4,), layers.Dense(2))
    assert by_path(dense, on_unsupported="error")


def test_coverage_prints_one_line_for_each_variable(capsys):
    model = sequential((6,), layers.Dense(4), layers.BatchNormalization())
    model.compile(optimizer=kso.KFAC(on_unsupported="gradient"), loss="mse")
    blocks = kso.coverage(model)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(model.trainable_variables) + 1
    assert [b.kind for b in blocks] == ["kronecker", "gradient", "gradient"]
    assert "no wrapper for BatchNormalization" in lines[3]


def test_planning_changes_nothing():
    model = sequential((6,), layers.Dense(4, activation="relu"), layers.Dense(3))
    before = [dict(vars(layer)) for layer in model.layers]
    plan_blocks(model)
    assert [dict(vars(layer)) for layer in model.layers] == before
