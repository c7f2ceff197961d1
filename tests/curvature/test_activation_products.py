"""Structural damping: the curvature of hidden activations, against NumPy."""

import keras
import numpy as np
import problems
import pytest
from keras import layers

from keras_secondorder import autodiff
from keras_secondorder.capture import recurrent_layers
from keras_secondorder.curvature.products import fisher_products

# Products of four float32 time steps against float64 central differences.
RTOL = 1e-4
# The same forward pass twice.
SAME = 1e-6
ROWS, STEPS, FEATURES, UNITS = 5, 4, 2, 3


def hidden(parameters, x, steps):
    """The hidden sequence of a tanh network, (N, T, units), in float64."""
    kernel, recurrent, bias = parameters
    h, sequence = np.zeros((len(x), UNITS)), []
    for t in steps:
        h = np.tanh(x[:, t] @ kernel + h @ recurrent + bias)
        sequence.append(h)
    return np.stack(sequence, axis=1)


def activations(flat, x, both_ways):
    """The hidden sequences of one direction, or of two, one after the other."""
    shapes = [(FEATURES, UNITS), (UNITS, UNITS), (UNITS,)] * (2 if both_ways else 1)
    cuts = np.cumsum([np.prod(s) for s in shapes])[:-1]
    parts = [p.reshape(s) for p, s in zip(np.split(flat, cuts), shapes, strict=True)]
    forward = hidden(parts[:3], x, range(STEPS))
    if not both_ways:
        return forward.ravel()
    backward = hidden(parts[3:], x, reversed(range(STEPS)))
    return np.concatenate([forward.ravel(), backward.ravel()])


def jacobian(flat, x, both_ways, width=1e-6):
    columns = [
        (activations(flat + e, x, both_ways) - activations(flat - e, x, both_ways))
        / (2 * width)
        for e in width * np.eye(len(flat))
    ]
    return np.stack(columns, axis=1)


def flat(tensors):
    return np.concatenate([keras.ops.convert_to_numpy(t).ravel() for t in tensors])


@pytest.mark.parametrize(
    ("both_ways", "sequences"),
    [(False, False), (False, True), (True, False)],
    ids=["last", "sequences", "bidirectional"],
)
def test_product_is_that_of_the_hidden_sequences(both_ways, sequences):
    rnn = layers.SimpleRNN(UNITS, return_sequences=sequences)
    if both_ways:
        rnn = layers.Bidirectional(rnn)
    stack = [rnn, *([layers.Flatten()] if sequences else []), layers.Dense(2)]
    model = problems.sequential(stack, (STEPS, FEATURES))
    model.compile(optimizer="sgd", loss="mse")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, STEPS, FEATURES)).astype("float32")
    y = rng.normal(size=(ROWS, 2)).astype("float32")
    watched = recurrent_layers(model)
    assert len(watched) == 1 + both_ways
    attributes = [set(vars(layer)) for layer in watched]

    recurrent = np.concatenate(
        [np.array(keras.ops.convert_to_numpy(v)).ravel() for v in rnn.weights]
    )
    J = jacobian(recurrent.astype(float), x.astype(float), both_ways)
    expected = J.T @ J / ROWS
    with autodiff.no_grad():
        objective = problems.objective_of(model, x, y)
        network = objective.linearize_network(watch=watched)
        damped = fisher_products(objective, network, structural=1.0)
        undamped = fisher_products(objective, network)
        for _ in range(2):
            v = [
                keras.ops.convert_to_tensor(rng.normal(size=v.shape), dtype="float32")
                for v in model.trainable_variables
            ]
            ours = flat(damped.product(v)) - flat(undamped.product(v))
            count = len(recurrent)
            theirs = expected @ flat(v)[:count]
            # What comes after the recurrent layers has no part in it.
            theirs = np.pad(theirs, (0, len(ours) - count))
            scale = max(np.abs(theirs).max(), np.abs(flat(damped.product(v))).max())
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=RTOL * scale)

    plain = keras.ops.convert_to_numpy(model(x))
    seen = keras.ops.convert_to_numpy(network.outputs[0])
    np.testing.assert_allclose(seen, plain, rtol=SAME, atol=SAME)
    assert [set(vars(layer)) for layer in watched] == attributes
    assert all(layer.return_sequences == sequences for layer in watched)


@pytest.mark.parametrize("zeros", [False, True], ids=["carried", "zeros"])
def test_masked_steps_leave_the_outputs_as_they_are(zeros):
    """A layer that returns its last step must also hand on the mask of that."""
    rnn = layers.SimpleRNN(UNITS, zero_output_for_mask=zeros)
    model = problems.sequential(
        [layers.Masking(), rnn, layers.Dense(1)], (STEPS, FEATURES)
    )
    model.compile(optimizer="sgd", loss="mse")
    x = np.random.default_rng(0).normal(size=(ROWS, STEPS, FEATURES)).astype("float32")
    x[1, 2:] = 0.0
    x[2, 3:] = 0.0
    plain = keras.ops.convert_to_numpy(model(x))
    with autodiff.no_grad():
        objective = problems.objective_of(model, x, x[:, 0, :1])
        network = objective.linearize_network(watch=[rnn])
    seen = keras.ops.convert_to_numpy(network.outputs[0])
    np.testing.assert_allclose(seen, plain, rtol=SAME, atol=SAME)
