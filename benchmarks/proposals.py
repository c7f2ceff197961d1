"""Block-diagonal and block-tridiagonal K-FAC at the same weights, without noise.

Along one run of `KFAC()` on the MNIST autoencoder, both forms get the same moments and
the same gradient, of `--rows` images or of the first 1,000 of them. What counts is by
how much the exact damped quadratic model falls along each proposal at its best length,
and at the best length and momentum. A ratio above 1 is for the tridiagonal form.
"""

import common

args = common.parse_arguments(
    __doc__, rows=5000, looks=[8, 40, 120], gammas=[0.03, 0.1, 0.3, 1.0, 3.0]
)

import comparison
import datasets
import keras
import networks
import numpy as np
from keras import ops

import keras_secondorder as kso
from keras_secondorder import autodiff, vectors
from keras_secondorder.curvature import (
    BlockDiagonal,
    BlockTridiagonal,
    batch_factors,
    fisher_model,
)
from keras_secondorder.likelihoods import loss_weights_of
from keras_secondorder.objective import Objective

BATCH = 1000


def add_variable(shape, initializer="zeros", dtype=None, name=None):
    """As an optimizer's, for forms without one."""
    return keras.Variable(ops.zeros(shape, dtype), trainable=False, name=name)


def look(model, images, step):
    """Rows of the table at the present weights."""
    damping = float(ops.convert_to_numpy(model.optimizer.damping_value))
    previous = vectors.values(model.optimizer.previous)
    tridiagonal = BlockTridiagonal(model, add_variable)
    diagonal = BlockDiagonal(model, add_variable)
    ridge = [damping + eta for eta in tridiagonal.eta]
    models = []
    for count in sorted({BATCH, args.rows}):
        x = ops.convert_to_tensor(images[:count])
        objective = Objective(
            model, x, x, None, tridiagonal.wrappers, loss_weights_of(model)
        )
        linear = objective.linearize(taps=True)
        gradient, _ = objective.gradient(linear)
        weights = linear.aux.weights
        models.append((gradient, fisher_model(objective, weights, gradient, ridge, 1)))
    counter = ops.zeros((), "int32")
    factors = batch_factors(
        objective, linear, tridiagonal.blocks, "sampled", 1.0, 0, counter
    )
    for chained, block, new in zip(
        tridiagonal.blocks, diagonal.blocks, factors, strict=True
    ):
        vectors.assign(chained.factors, new)
        vectors.assign(block.factors, new[:: len(new) // 2])  # without the cross ones
    rows = []
    for share in args.gammas:
        gamma = ops.convert_to_tensor(np.float32(share * damping**0.5))
        both = diagonal, tridiagonal
        forms = [(form, form.damped_inverses(gamma)) for form in both]
        linked = (forms[1][1].values[i] for i, _ in tridiagonal.links)
        strongest = max(float(ops.max(v[1]) * ops.max(v[3])) for v in linked)
        row = [str(step), f"{damping:.3g}", f"{share:g}", f"{strongest:.2f}"]
        for gradient, quadratic in models:
            proposals = [
                form.precondition(gradient, inverses, gamma**2, {}, {})
                for form, inverses in forms
            ]
            Q, b = map(ops.convert_to_numpy, quadratic([*proposals, previous]))
            for chosen in ([0], [1]), ([0, 2], [1, 2]):
                falls = [fall(Q.astype(float), b.astype(float), c) for c in chosen]
                row += [f"{falls[0]:.3f}", f"{falls[1] / falls[0]:.3f}"]
        rows.append(row)
    return rows


def fall(Q, b, chosen):
    """By how much the quadratic model falls at best in the span of some vectors."""
    return 0.5 * b[chosen] @ np.linalg.solve(Q[np.ix_(chosen, chosen)], b[chosen])


def main():
    """Train, look now and then, and print the table."""
    (x, _), _, data_name = datasets.load_mnist(args.data)
    print(f"{data_name}, {keras.config.backend()}", flush=True)
    keras.utils.set_random_seed(0)
    generator = np.random.default_rng(0)
    model = networks.autoencoder(x.shape[1], 0)
    networks.compile_autoencoder(model, kso.KFAC())
    header = ["step", "lambda", "gamma / sqrt(lambda)", "max s_A s_G"]
    for count in sorted({BATCH, args.rows}):
        header += [f"{count}: alpha", "ratio", "alpha, mu", "ratio"]
    rows, step = [], 0
    for target in args.looks:
        for _ in range(target - step):
            batch = x[generator.permutation(len(x))[:BATCH]]
            model.train_on_batch(batch, batch)
        step = target
        with autodiff.no_grad():
            rows += look(model, x[generator.integers(0, len(x), args.rows)], step)
    comparison.print_table(header, rows)


if __name__ == "__main__":
    main()
