"""What a product with a curvature matrix costs, in gradients of the same objective.

On the MNIST autoencoder. "one" computes the product from scratch, forward pass too,
in one compiled function; "in a loop" is `A @ v` for 50 vectors at the same point, where
the forward pass is not repeated. All are timed in turn, and medians are compared.
"""

import common

args = common.parse_arguments(__doc__, batch_size=1000, rounds=9, loop=50)

import statistics
import time

import datasets
import keras
import networks
import numpy as np
from keras import ops

import keras_secondorder as kso
from keras_secondorder import autodiff, vectors
from keras_secondorder.curvature.products import (
    fisher_products,
    gauss_newton_products,
    hessian_products,
)
from keras_secondorder.likelihoods import loss_weights_of
from keras_secondorder.objective import Objective


def compiled(function):
    """The function as the backend in use runs it fastest."""
    if keras.config.backend() == "tensorflow":
        import tensorflow as tf

        return tf.function(function)
    return autodiff.compiled(function)


def finished(result):
    """Wait for a result: JAX computes in the background."""
    return float(ops.convert_to_numpy(keras.tree.flatten(result)[-1]).ravel()[0])


def main():
    """Time everything and print the table."""
    (x, _), _, data_name = datasets.load_mnist(args.data)
    x = ops.convert_to_tensor(x[: args.batch_size])
    model = networks.autoencoder(x.shape[1], seed=0)
    networks.compile_autoencoder(model, "sgd")
    variables = model.trainable_variables
    random = np.random.default_rng(0)
    v = [random.normal(size=w.shape).astype("float32") for w in variables]
    v = [ops.convert_to_tensor(a) for a in v]
    parameters = vectors.values(variables)
    operators = {
        "Hessian": (hessian_products, kso.curvature.hessian(model, x, x)),
        "Gauss-Newton": (
            gauss_newton_products,
            kso.curvature.gauss_newton(model, x, x),
        ),
        "Fisher": (fisher_products, kso.curvature.fisher(model, x)),
    }
    loss_weights = loss_weights_of(model)

    def objective(parameters):
        state = vectors.values(model.non_trainable_variables + model.metrics_variables)
        return Objective(
            model, x, x, None, loss_weights=loss_weights, values=(parameters, state)
        )

    def gradient(parameters):
        h = objective(parameters)
        linear = autodiff.vjp(lambda p, tap: ([h.value(p)], ()), parameters, taps=False)
        return linear.pullback([ops.ones(())])

    def one(build):
        return compiled(lambda p, v: build(objective(p)).product(v))

    timed = {"gradient": (compiled(gradient), (parameters,), 1)}
    for name, (build, operator) in operators.items():
        timed[f"{name}, one"] = (one(build), (parameters, v), 1)
        flat = vectors.flatten(v, "float32")
        timed[f"{name}, in a loop"] = (operator.matvec, (flat,), args.loop)

    times = {name: [] for name in timed}
    with autodiff.no_grad():
        for round_ in range(args.rounds + 1):
            for name, (function, arguments, repeats) in timed.items():
                repeats = repeats if round_ else 1
                start = time.perf_counter()
                for _ in range(repeats):
                    result = function(*arguments)
                finished(result)
                elapsed = (time.perf_counter() - start) / repeats
                if round_:  # the first compiles
                    times[name].append(elapsed)
    median = {name: 1e3 * statistics.median(t) for name, t in times.items()}
    print(f"{data_name}, {keras.config.backend()}, batch {x.shape[0]}")
    print(f"{'':<26}{'ms':>8}{'gradients':>11}")
    for name, value in median.items():
        print(f"{name:<26}{value:8.1f}{value / median['gradient']:11.2f}")


if __name__ == "__main__":
    main()
