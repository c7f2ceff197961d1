"""How well updated backpropagation predicts the gradient after layers have moved.

The network is the deep autoencoder of the examples, with narrower layers, trained by
Adam for a while. Then, for each layer: all layers above it take a gradient step, and
its gradient there is compared with the old one, which backpropagation would use, and
with the first-order prediction of `LayerwiseDescent`. Errors are relative to the norm
of the true gradient. A second table trains with each of the three gradients.
"""

import common

args = common.parse_arguments(
    __doc__,
    rates=[0.003, 0.01, 0.03, 0.1],
    warm_up=100,
    steps=100,
    batch_size=500,
    seed=0,
)

import comparison
import datasets
import keras
import networks
import numpy as np
from keras import ops

import keras_secondorder as kso
from keras_secondorder import autodiff
from keras_secondorder.likelihoods import loss_weights_of
from keras_secondorder.objective import Objective
from keras_secondorder.optimizers.layerwise_descent import GRADIENTS

WIDTHS, CODE = (100, 50), 20


def build(pixels):
    """The autoencoder, pixels-100-50-20 and back."""
    keras.utils.set_random_seed(args.seed)
    return networks.autoencoder(pixels, args.seed, WIDTHS, CODE)


def batches(x, count):
    """Batches of images, in pass after pass."""
    random, order = np.random.default_rng(args.seed), []
    for _ in range(count):
        if len(order) < args.batch_size:
            order = list(random.permutation(len(x)))
        rows, order = order[: args.batch_size], order[args.batch_size :]
        yield x[rows]


def per_layer(model, x, rate):
    """Rows of the first table."""
    objective = Objective(model, x, x, None, (), loss_weights_of(model))
    old, product = autodiff.linearize_gradient(objective.value, objective.parameters)
    places, rows = [], []
    for layer in model.layers:
        start = sum(map(len, places))
        places.append(range(start, start + len(layer.trainable_variables)))
    move = [ops.zeros_like(g) for g in old]
    for number in reversed(range(len(places))):
        if number < len(places) - 1:
            # The layers above have moved, this one and those below have not.
            there = objective.moved(move)
            true, _ = autodiff.linearize_gradient(objective.value, there)
            change = product(move)
            here = flat(old, places[number])
            after = flat(true, places[number])
            predicted = here + flat(change, places[number])
            cells = [size(here - after, after), size(predicted - after, after)]
            cells += [cosine(here, after), cosine(predicted, after)]
            shape = "-".join(str(n) for n in model.layers[number].kernel.shape)
            name = f"{number + 1}: {shape}"
            rows.append([name, f"{rate:g}", *(f"{cell:.4f}" for cell in cells)])
        for i in places[number]:
            move[i] = -rate * old[i]
    return rows


def flat(tensors, places):
    """The tensors of a layer as one vector in float64."""
    parts = [ops.convert_to_numpy(tensors[i]).astype(float).ravel() for i in places]
    return np.concatenate(parts)


def size(error, of):
    """A norm relative to another."""
    return np.linalg.norm(error) / np.linalg.norm(of)


def cosine(a, b):
    """The cosine of two vectors."""
    return a @ b / (np.linalg.norm(a) * np.linalg.norm(b))


def train(x, weights, rate, gradient):
    """The loss on the first batches after some steps."""
    model = build(x.shape[1])
    optimizer = kso.LayerwiseDescent(rate, gradient)
    networks.compile_autoencoder(model, optimizer)
    model.set_weights(weights)
    for batch in batches(x, args.steps):
        model.train_on_batch(batch, batch)
    part = x[:2000]
    return model.evaluate(part, part, batch_size=1000, verbose=0)


def main():
    """Warm up, measure, train, and print the tables."""
    (x, _), _, data_name = datasets.load_mnist(args.data)
    print(
        f"{data_name}, {keras.config.backend()}, after {args.warm_up} steps of Adam, "
        f"batch size {args.batch_size}"
    )
    model = build(x.shape[1])
    networks.compile_autoencoder(model, keras.optimizers.Adam(1e-3))
    for batch in batches(x, args.warm_up):
        model.train_on_batch(batch, batch)
    weights, batch = model.get_weights(), x[: args.batch_size]

    with autodiff.no_grad():
        rows = [row for rate in args.rates for row in per_layer(model, batch, rate)]
    header = ["layer", "rate", "error, old", "updated", "cosine, old", "updated"]
    comparison.print_table(header, rows)

    rows = []
    for rate in args.rates:
        losses = [train(x, weights, rate, gradient) for gradient in GRADIENTS]
        rows.append([f"{rate:g}", *(f"{loss:.3f}" for loss in losses)])
    comparison.print_table(["rate", *GRADIENTS], rows)
    print(f"The second table: training loss after {args.steps} steps more.")


if __name__ == "__main__":
    main()
