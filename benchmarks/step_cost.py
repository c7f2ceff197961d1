"""What a step of K-FAC costs beside a step of Adam, on the MNIST autoencoder.

All variants are timed in turn, several rounds in one run, and the median of each is
taken: on a noisy machine only such ratios mean something. The parts are differences
between variants that do more and less of them.
"""

import common

args = common.parse_arguments(__doc__, batch_size=1000, rounds=5, parts=False)

import statistics
import time

import datasets
import keras
import networks

import keras_secondorder as kso

NEVER = 10**9
STEPS = 20  # all intervals of the defaults divide it


def variants():
    """The optimizers to time, by name."""
    bare = {"statistics_every": NEVER, "inverse_every": NEVER}
    adaptive = {"learning_rate": "adaptive", "momentum": "adaptive"}
    timed = {
        "Adam": keras.optimizers.Adam(1e-3),
        "fixed": kso.KFAC(),
        "adaptive": kso.KFAC(**adaptive, damping=kso.AdaptiveDamping()),
    }
    if args.parts:
        timed |= {
            "bare": kso.KFAC(**bare),
            "statistics": kso.KFAC(**bare | {"statistics_every": 1}),
            "inverses": kso.KFAC(**bare | {"inverse_every": 1}),
            "model": kso.KFAC(**bare, **adaptive),
            "rho": kso.KFAC(
                **bare,
                **adaptive,
                damping=kso.AdaptiveDamping(every=1, gamma_every=None),
            ),
            "gammas": kso.KFAC(
                **bare,
                **adaptive,
                damping=kso.AdaptiveDamping(every=10_000, decay=0.9999, gamma_every=1),
            ),
        }
    return timed


def main():
    """Time the variants and print the table."""
    (x, _), _, data_name = datasets.load_mnist(args.data)
    x = x[: STEPS * args.batch_size]
    batches = len(x) // args.batch_size
    x = x[: batches * args.batch_size]
    print(f"{data_name}, {keras.config.backend()}, batch {args.batch_size}")
    models, times = {}, {}
    for name, optimizer in variants().items():
        models[name] = networks.autoencoder(x.shape[1], seed=0)
        networks.compile_autoencoder(models[name], optimizer)
        start = time.perf_counter()
        one_round(models[name], x)
        times[name] = []
        print(f"compiled {name}: {time.perf_counter() - start:.1f} s", flush=True)
    for _ in range(args.rounds):
        for name, model in models.items():
            start = time.perf_counter()
            one_round(model, x)
            times[name].append((time.perf_counter() - start) / batches)

    median = {name: 1000 * statistics.median(t) for name, t in times.items()}
    print(f"\n{'optimizer':<12}{'ms a step':>10}{'ratio to Adam':>15}")
    for name in ("Adam", "fixed", "adaptive"):
        print(f"{name:<12}{median[name]:10.1f}{median[name] / median['Adam']:15.2f}")
    if args.parts:
        parts = {
            "gradient and Adam's update": median["Adam"],
            "preconditioning": median["bare"] - median["Adam"],
            "statistics, each time": median["statistics"] - median["bare"],
            "inverses, each time": median["inverses"] - median["bare"],
            "quadratic model": median["model"] - median["bare"],
            "reduction ratio, each time": median["rho"] - median["model"],
            "trial of gammas, each time": median["gammas"] - median["model"],
        }
        print()
        for name, value in parts.items():
            print(f"{name:<30}{value:8.1f} ms")


def one_round(model, x):
    """One pass over the data through `fit`."""
    model.fit(x, x, batch_size=args.batch_size, verbose=0, shuffle=False)


if __name__ == "__main__":
    main()
