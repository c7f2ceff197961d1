"""The plan of blocks: which variable gets which, why, and how much memory."""

import keras
import numpy as np
import problems
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


def test_r16_lora_has_a_block_for_its_thin_kernels():
    model = sequential((6,), layers.Dense(4), layers.Dense(3))
    model.layers[0].enable_lora(2)
    lora, *_ = plan_blocks(model)
    assert lora.kind == "kronecker"
    assert lora.factors == "A 6 x 6, G 2 x 2; A 3 x 3, G 4 x 4"
    names = [v.name for v in lora.variables]
    assert names == ["lora_kernel_a", "lora_kernel_b", "bias"]


def test_lora_in_other_layers_is_named():
    model = sequential((4, 6), layers.Conv1D(3, 2))
    model.layers[0].enable_lora(2)
    assert set(reasons(model).values()) == {"LoRA is enabled"}


def test_r14_shared_layers_have_a_block():
    """Whatever the number of calls; they are positions of one layer."""
    x = keras.Input((6,))
    dense, inner = layers.Dense(6), keras.Sequential([layers.Dense(6)])
    model = keras.Model(x, dense(inner(dense(inner(inner(x))))))
    assert {b.kind for b in by_path(model).values()} == {"kronecker"}


def test_variable_read_outside_of_its_layer_is_named():
    class Tied(keras.Model):
        def __init__(self):
            super().__init__()
            self.embedding = layers.Embedding(11, 4)
            self.hidden = layers.Dense(4)

        def call(self, ids):
            h = self.hidden(self.embedding(ids))
            return keras.ops.matmul(h, keras.ops.transpose(self.embedding.embeddings))

    model = Tied()
    model(np.zeros((2, 3), "int32"))
    assert list(reasons(model).values()) == ["also used outside of its layer", "", ""]


def test_spectral_normalization_is_named():
    layer = layers.SpectralNormalization(layers.Dense(3))
    model = sequential((4,), layer)
    kernel, bias = reasons(model).values()
    assert kernel == bias == f"'{layer.name}' rewrites its kernel while training"


def test_r16_layer_outside_the_forward_pass_is_named():
    class Unused(keras.Model):
        def __init__(self):
            super().__init__(name="whole")
            self.used = layers.Dense(3, name="used")
            self.spare = layers.Dense(2, name="spare")
            self.spare.build((None, 6))
            self.never = layers.Dense(9)
            self.loop = layers.TimeDistributed(layers.Dense(2))

        def call(self, x):
            return self.used(x)

    model = Unused()
    model(np.zeros((1, 6), "float32"))
    found = reasons(model)
    spare = {path: why for path, why in found.items() if "spare" in path}
    assert list(spare.values()) == ["not used in the forward pass"] * 2
    assert len(found) == 4
    # Those that were never built have nothing to train.
    assert len(kso.coverage(model)) == 3


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
    assert kinds[4:] == [("kronecker", "")] * 3


def test_r18_no_big_factor():
    ids, wide = keras.Input((1,), dtype="int32"), keras.Input((20_000,))
    embedded = layers.Flatten()(layers.Embedding(50_000, 64)(ids))
    outputs = layers.Concatenate()([embedded, layers.Dense(8)(wide)])
    model = keras.Model([ids, wide], layers.Dense(2)(outputs))
    embedding, kernel, _, last, _ = by_path(model).values()
    assert {b.kind for b in (embedding, kernel, last)} == {"kronecker"}
    # A factor and its inverse of four bytes an entry; the large sides are diagonal.
    assert embedding.bytes == 8 * (50_000 + 64**2)
    assert kernel.bytes == 8 * (20_001 + 8**2)
    text = table(plan_blocks(model))
    for part in ("A 50000 (diagonal), G 64 x 64", "A 20001 (diagonal), G 8 x 8"):
        assert part in text
    total = embedding.bytes + kernel.bytes + last.bytes
    assert f"curvature memory: {total:,} bytes, {2 * total:,} more" in text
    # What the table says is what the optimizer takes, beside one direction.
    model.compile(optimizer=kso.KFAC(), loss="mse")
    sizes = [4 * int(np.prod(v.shape)) for v in model.optimizer.variables]
    assert max(sizes) == 4 * 50_000 * 64
    parameters = 4 * model.count_params()
    assert total + parameters <= sum(sizes) <= total + parameters + 100


def test_r18_dense_4096_1000():
    model = sequential((4096,), layers.Dense(1000))
    block = plan_blocks(model)[0]
    assert block.factors == "A 4097 x 4097, G 1000 x 1000"
    assert block.bytes == 8 * (4097**2 + 1000**2)


def test_factor_memory_splits_the_largest_factors():
    model = sequential((400,), layers.Dense(100), layers.Dense(3))
    whole = sum(b.bytes for b in plan_blocks(model))
    for budget, expected in (
        (whole, ["A 401 x 401, G 100 x 100", "A 101 x 101, G 3 x 3"]),
        (
            whole - 1,
            ["A 401 x 401 in 2 blocks, G 100 x 100", "A 101 x 101, G 3 x 3"],
        ),
        (
            330_000,
            ["A 401 x 401 in 8 blocks, G 100 x 100", "A 101 x 101, G 3 x 3"],
        ),
        (0, ["A 401 (diagonal), G 100 (diagonal)", "A 101 (diagonal), G 3 (diagonal)"]),
    ):
        blocks = plan_blocks(model, factor_memory=budget)
        assert [b.factors for b in blocks] == expected
        assert sum(b.bytes for b in blocks) <= max(budget, 8 * 605)


def test_factor_memory_counts_eigenvalues_that_nothing_splits():
    """One number for each weight leaves less of the budget to the factors."""
    model = sequential((300,), layers.Dense(200, use_bias=False), layers.Dense(7))
    weights = 4 * (300 * 200 + 201 * 7)
    full = 8 * (300**2 + 200**2 + 201**2 + 7**2)
    for budget in (full + weights, full, weights, 0):
        blocks = plan_blocks(model, factor_memory=budget, eigenvalues=True)
        total = sum(b.bytes for b in blocks)
        if budget > weights:
            assert total <= budget
        factors = sum(s.bytes for b in blocks for pair in b.sides for s in pair)
        assert total >= 2 * factors + weights  # more where a block is padded
        assert (total == full + weights) == (budget == full + weights)


def test_max_factor_size():
    model = sequential((6,), layers.Dense(4), layers.Dense(3))
    for most, expected in ((7, "A 7 x 7, G 4 x 4"), (6, "A 7 (diagonal), G 4 x 4")):
        first, second = plan_blocks(model, max_factor_size=most)
        assert first.factors == expected
        assert second.factors == "A 5 x 5, G 3 x 3"


def test_on_unsupported():
    model = sequential((4,), problems.UnknownDense(3, name="own"), layers.Dense(2))
    for choice, size in (("diagonal", 4 * 12), ("gradient", 0)):
        kernel, *_ = by_path(model, on_unsupported=choice).values()
        assert (kernel.kind, kernel.bytes) == (choice, size)
        assert kernel.reason == "no wrapper for UnknownDense"
    message = r"own/kernel \(no wrapper for UnknownDense\).*on_unsupported='diagonal'"
    with pytest.raises(ValueError, match=message):
        plan_blocks(model, on_unsupported="error")
    with pytest.raises(ValueError, match="own/kernel"):
        model.compile(optimizer=kso.KFAC(on_unsupported="error"), loss="mse")
    dense = sequential((4,), layers.Dense(2))
    assert by_path(dense, on_unsupported="error")


def test_coverage_prints_one_line_for_each_variable(capsys):
    model = sequential((6,), layers.Dense(4), problems.UnknownDense(3))
    model.compile(optimizer=kso.KFAC(on_unsupported="gradient"), loss="mse")
    blocks = kso.coverage(model)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(model.trainable_variables) + 1
    assert [b.kind for b in blocks] == ["kronecker", "gradient", "gradient"]
    assert "no wrapper for UnknownDense" in lines[3]


def test_planning_changes_nothing():
    model = sequential((6,), layers.Dense(4, activation="relu"), layers.Dense(3))
    before = [dict(vars(layer)) for layer in model.layers]
    plan_blocks(model)
    assert [dict(vars(layer)) for layer in model.layers] == before
