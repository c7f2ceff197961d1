"""Which dense layers are seen with the next one."""

import keras
import pytest
from keras import layers

import keras_secondorder as kso
from keras_secondorder.capture import plan_blocks
from keras_secondorder.capture.chains import link_bytes


def dense(name, units=3, **kwargs):
    return layers.Dense(units, name=name, **kwargs)


def links(model, **plan):
    """`{layer: the one that follows it}`, by name."""
    return {
        b.layer_name: b.successor.layer.name
        for b in plan_blocks(model, chains=True, **plan)
        if b.successor is not None
    }


def sequential(*stack, shape=(6,)):
    return keras.Sequential([keras.Input(shape), *stack])


def test_sequential_model_in_both_ways_of_making_one():
    listed = sequential(dense("a", activation="tanh"), dense("b"), dense("c"))
    grown = keras.Sequential([keras.Input((6,))])
    for name in "abc":
        grown.add(dense(name))
    assert links(listed) == links(grown) == {"a": "b", "b": "c"}
    assert [b.successor for b in plan_blocks(listed)] == [None] * 3


def test_layers_between_that_act_on_each_number_alone():
    passing = [
        layers.ReLU(),
        layers.Dropout(0.5),
        layers.Activation("tanh"),
        layers.Reshape((2, 3)),
        layers.Flatten(),
        layers.GaussianNoise(0.1),
    ]
    assert links(sequential(dense("a", 6), *passing, dense("b"))) == {"a": "b"}


@pytest.mark.parametrize(
    "between",
    [layers.BatchNormalization(), layers.LayerNormalization(), layers.Softmax()],
    ids=lambda layer: layer.name,
)
def test_layers_between_that_mix(between):
    assert links(sequential(dense("a"), between, dense("b"))) == {}


def test_frozen_layer_ends_a_chain():
    model = sequential(dense("a"), dense("b"), dense("c"), dense("d"))
    model.get_layer("b").trainable = False
    assert links(model) == {"c": "d"}


def functional(body):
    inputs = keras.Input((6,))
    return keras.Model(inputs, body(inputs))


def test_functional_chain():
    model = functional(lambda x: dense("b")(layers.ReLU()(dense("a")(x))))
    assert links(model) == {"a": "b"}


def test_branches_end_chains():
    def residual(x):
        h = dense("a")(x)
        return dense("c")(h + dense("b")(h))

    def two_heads(x):
        h = dense("b")(dense("a")(x))
        return [dense("c")(h), dense("d")(h)]

    def seen_from_outside(x):
        h = dense("a")(x)
        return [h, dense("b")(h)]

    assert links(functional(residual)) == {}
    assert links(functional(two_heads)) == {"a": "b"}
    assert links(functional(seen_from_outside)) == {}


def test_layer_called_twice():
    def siamese(x):
        shared = dense("shared", 6)
        return dense("b")(dense("a")(shared(shared(x))))

    assert links(functional(siamese)) == {"a": "b"}


def test_only_the_calls_in_this_model_count():
    """The layers were part of another model first, in another order."""
    a, b, c = dense("a", 6), dense("b", 6), dense("c", 6)
    functional(lambda x: c(b(a(x))))
    assert links(functional(lambda x: a(c(b(x))))) == {"b": "c", "c": "a"}
    assert links(functional(lambda x: a(x) + b(x))) == {}


def test_nested_models():
    encoder = sequential(dense("a"), dense("b"))
    decoder = functional(lambda x: dense("d", 6)(dense("c")(x)))
    chain = {"a": "b", "c": "d"}
    code = keras.Sequential([keras.Input((3,)), layers.Dense(6, name="code")])
    whole = {**chain, "b": "code", "code": "c"}
    assert links(keras.Sequential([encoder, code, decoder])) == whole
    assert links(functional(lambda x: decoder(code(encoder(x))))) == whole


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.a, self.b = dense("a"), dense("b")

    def build(self, shape):
        self.a.build(shape)
        self.b.build((None, 3))

    def call(self, x):
        return self.b(self.a(x))


def test_models_with_a_call_of_their_own():
    model = Subclassed()
    model.build((None, 6))
    assert links(model) == {}
    assert links(sequential(dense("x", 6), Subclassed(), dense("c"))) == {}


def test_layers_without_a_config():
    class Secret(layers.Layer):
        def __init__(self, function):
            super().__init__()
            self.function = function

        def call(self, x):
            return self.function(x)

    model = functional(lambda x: dense("b")(dense("a")(Secret(lambda t: t)(x))))
    assert links(model) == {}


def test_other_layers_and_several_positions():
    image = sequential(
        layers.Conv2D(2, 3), layers.Flatten(), dense("a"), dense("b"), shape=(5, 5, 1)
    )
    assert links(image) == {"a": "b"}
    assert links(sequential(dense("a"), dense("b"), shape=(4, 6))) == {}
    lora = sequential(dense("a"), dense("b"), dense("c"))
    lora.get_layer("b").enable_lora(2)
    assert links(lora) == {}


def test_memory_plan():
    """Links are made while they fit; a layer whose factors are split has none."""
    model = sequential(dense("a", 40), dense("b", 5), dense("c", 30))
    plain = sum(b.bytes for b in plan_blocks(model))
    a, b, _ = plan_blocks(model, chains=True)
    assert a.bytes - 2 * 4 * (7**2 + 40**2) == link_bytes(a.wrapper, b.wrapper)
    # Two moments, two Psi, and the eigenvalues of both sides.
    first = 4 * (2 * (7 * 41 + 40 * 5) + 7 + 40)
    assert link_bytes(a.wrapper, b.wrapper) == first
    assert links(model, factor_memory=plain + first) == {"a": "b"}
    assert links(model, factor_memory=plain + first - 4) == {"b": "c"}
    assert links(model, factor_memory=plain) == {}
    assert links(model, max_factor_size=40) == {}


def test_coverage_shows_the_links(capsys):
    model = sequential(dense("a"), dense("b"))
    blocks = kso.coverage(model, approximation="block_tridiagonal")
    assert [b.factors for b in blocks] == ["A 7 x 7, G 3 x 3, to b", "A 4 x 4, G 3 x 3"]
    assert "to b" in capsys.readouterr().out
    assert "to b" not in repr(kso.coverage(model))
    model.compile(optimizer=kso.KFAC(approximation="block_tridiagonal"), loss="mse")
    assert "to b" in repr(kso.coverage(model))
    with pytest.raises(ValueError, match="`approximation` must be one of"):
        kso.coverage(model, approximation="none")
    model.compile(optimizer=kso.KFAC(tikhonov="exact"), loss="mse")
    with pytest.raises(ValueError, match="tikhonov='exact' goes with `approximation`"):
        kso.coverage(model, approximation="block_tridiagonal")
