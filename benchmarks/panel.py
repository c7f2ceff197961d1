"""`KFAC()` untouched against tuned baselines, in seconds to a target loss.

Every baseline gets the same search: five learning rates over a factor of 16, each
constant and along a cosine, on a seed of its own, for a part of the time. The best of
them then runs in full beside `KFAC()`, from the same weights and on the same batches,
all of them in turn, a stretch of steps each, so that they share the machine's good and
bad moments. A cosine falls from stretch to stretch. The seconds are those of training
alone: every model is compiled by a first stretch that is undone and reported apart.
"""

import common

args = common.parse_arguments(
    __doc__,
    cifar="",
    problems=["all"],
    baselines=["all"],
    seeds=2,
    minutes=6.0,
    results="",
)

import json
import math
import pathlib
import platform
import statistics
import time

import comparison
import keras
import numpy as np
from problems import LARGE, PROBLEMS

import keras_secondorder as kso

FACTORS = (1 / 4, 1 / 2, 1, 2, 4)
BASELINES = {
    "Adam": (2e-3, keras.optimizers.Adam),
    "AdamW": (2e-3, keras.optimizers.AdamW),
    "SGD": (0.1, lambda rate: keras.optimizers.SGD(rate, 0.9, nesterov=True)),
    "Muon": (8e-3, keras.optimizers.Muon),
}
if args.baselines != ["all"]:
    BASELINES = {name: BASELINES[name] for name in args.baselines}
SEARCH_SEED = 1000
SEARCH_SHARE = 0.4  # of the minutes of a problem


class Run:
    """One optimizer on one problem, trained in stretches of steps.

    Args:
        problem: The problem.
        optimizer: The optimizer, with a number as its learning rate.
        seed: Seed of the weights and of the order of the examples.
    """

    def __init__(self, problem, optimizer, seed):
        keras.utils.set_random_seed(seed)
        self.problem, self.seed, self.rate = problem, seed, None
        self.model = problem.build(seed)
        self.model.compile(optimizer=optimizer, **problem.compiled)
        optimizer.build(self.model.trainable_variables)
        self.variables = [*self.model.variables, *optimizer.variables]
        self.initial = [
            np.array(keras.ops.convert_to_numpy(v)) for v in self.variables
        ]
        self.compilation = None

    def compile(self):
        """Train for a stretch that is undone, with all that is done but once."""
        self.compilation = self.fit(range(self.stretch))
        self.restart()

    def restart(self, rate=None):
        """Go back to the start; `rate(steps)` is the learning rate from now on."""
        for v, value in zip(self.variables, self.initial, strict=True):
            v.assign(value)
        self.rate = rate
        self.random = np.random.default_rng(self.seed)
        self.seconds, self.steps, self.curve = 0.0, 0, []
        self.measure()

    @property
    def stretch(self):
        """Examples between two measurements."""
        return self.problem.every * self.problem.batch_size

    def fit(self, rows):
        """One pass over some examples, in order; the seconds it takes."""
        rows = np.asarray(rows) % len(self.problem.x)
        x, y = self.problem.x[rows], self.problem.y[rows]
        size = self.problem.batch_size
        start = time.perf_counter()
        self.model.fit(x, y, batch_size=size, shuffle=False, verbose=0)
        return time.perf_counter() - start

    def measure(self):
        """Add `(steps, seconds, loss)` to the curve."""
        x, y = self.problem.x[:2000], self.problem.y[:2000]
        # The last one is the metric, where the problem has one.
        loss = self.model.evaluate(x, y, batch_size=1000, verbose=0)
        self.curve.append((self.steps, self.seconds, float(np.ravel(loss)[-1])))

    def advance(self):
        """Train for one stretch and measure."""
        count = len(self.problem.x)
        orders = [self.random.permutation(count) for _ in range(self.stretch // count)]
        rest = self.random.permutation(count)[: self.stretch % count]
        if self.rate is not None:
            self.model.optimizer.learning_rate = self.rate(self.steps)
        self.seconds += self.fit(np.concatenate([*orders, rest]))
        self.steps += self.problem.every
        self.measure()

    @property
    def loss(self):
        """The best loss so far; infinite where there is none."""
        return min((v for _, _, v in self.curve if math.isfinite(v)), default=math.inf)

    @property
    def done(self):
        """Whether the target is reached, or the loss is lost."""
        return self.loss <= self.problem.target or not math.isfinite(self.curve[-1][2])

    def reached(self):
        """`(steps, seconds)` at the target, or infinities."""
        return first(self.curve, self.problem.target)


def first(curve, goal):
    """`(steps, seconds)` where a curve is at a loss, or infinities."""
    for steps, seconds, loss in curve:
        if loss <= goal:
            return steps, seconds
    return math.inf, math.inf


def schedule(rate, cosine, steps):
    """A rate, or its fall to zero along a cosine, as a function of the step."""
    if not cosine:
        return lambda step: rate
    return lambda step: rate * 0.5 * (1.0 + math.cos(math.pi * min(1.0, step / steps)))


def search(problem, name, seconds):
    """The learning rate and schedule of a baseline that do best in a short run."""
    middle, make = BASELINES[name]
    run = Run(problem, make(middle), SEARCH_SEED)
    run.compile()
    run.advance()  # how far the seconds go, the same for all rates
    share = seconds / len(FACTORS) / 2
    most = problem.steps // problem.every
    steps = problem.every * min(most, max(2, int(share / run.seconds)))
    found = []
    for factor in FACTORS:
        for cosine in (False, True):
            run.restart(schedule(factor * middle, cosine, steps))
            while run.steps < steps and not run.done:
                run.advance()
            found.append(((*run.reached(), run.loss), factor * middle, cosine))
    (_, _, loss), rate, cosine = min(found, key=lambda f: f[0])
    kind = "cosine" if cosine else "constant"
    print(f"{name}: rate {rate:g}, {kind}: {loss:.4g} within {steps}", flush=True)
    return rate, cosine


def race(problem, tuned, seed, seconds):
    """All optimizers in turn, until each is done or the seconds are over."""
    runs = {"KFAC": Run(problem, kso.KFAC(), seed)}
    for name, (rate, _) in tuned.items():
        runs[name] = Run(problem, BASELINES[name][1](rate), seed)
    for run in runs.values():  # no sooner: TensorFlow forgets it with each new seed
        run.compile()
    for name, (rate, cosine) in tuned.items():
        runs[name].restart(schedule(rate, cosine, problem.steps))
    while sum(r.seconds for r in runs.values()) < seconds:
        going = [r for r in runs.values() if not r.done and r.steps < problem.steps]
        if not going:
            break
        # The one that is behind in seconds goes next: all stay side by side.
        min(going, key=lambda r: r.seconds).advance()
    return runs


def main():
    """Run the problems, print the table, and write JSON and a picture."""
    names = list(PROBLEMS) if args.problems == ["all"] else args.problems
    results = {
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "keras": keras.__version__,
        "backend": keras.config.backend(),
        "keras_secondorder": kso.__version__,
        "problems": {},
    }
    for name in names:
        problem = (PROBLEMS | LARGE)[name](args)
        print(f"\n{name}, target {problem.target:g}", flush=True)
        seconds = 60 * args.minutes * problem.share
        share = SEARCH_SHARE * seconds / len(BASELINES)
        tuned = {b: search(problem, b, share) for b in BASELINES}
        seeds = []
        for seed in range(args.seeds):
            left = (1 - SEARCH_SHARE) * seconds / args.seeds
            runs = race(problem, tuned, seed, left)
            seeds.append({b: record(run) for b, run in runs.items()})
        results["problems"][name] = {
            "target": problem.target,
            "tuned": {b: {"rate": r, "cosine": c} for b, (r, c) in tuned.items()},
            "seeds": seeds,
        }
        summarise(results)
        write(results)


def record(run):
    """What is kept of a run."""
    steps, seconds = run.reached()
    return {
        "steps": steps,
        "seconds": seconds,
        "loss": run.loss,
        "compilation": run.compilation,
        "curve": run.curve,
    }


def goal_of(found):
    """The target; where no baseline is there in time, the least loss that one has."""
    seeds = found["seeds"]
    least = min(max(s[b]["loss"] for s in seeds) for b in BASELINES)
    return max(found["target"], least)


def summarise(results):
    """Add the ratios to the best baseline, and print the table."""
    rows, ratios = [], {"steps": [], "seconds": []}
    for name, found in results["problems"].items():
        goal, seeds = goal_of(found), found["seeds"]
        means = {}
        for b in seeds[0]:
            times = np.array([first(s[b]["curve"], goal) for s in seeds])
            means[b] = times.mean(axis=0)
        ours = means["KFAC"]
        best = min(BASELINES, key=lambda b: means[b][1])
        for i, k in enumerate(ratios):
            theirs = min(means[b][i] for b in BASELINES)
            found[f"{k}_ratio"] = float(ours[i] / theirs)
            ratios[k].append(found[f"{k}_ratio"])
        found["goal"] = goal
        cells = [
            f"{v:.4g}" for pair in zip(ours, means[best], strict=True) for v in pair
        ]
        cells += [f"{found[f'{k}_ratio']:.2f}" for k in ratios]
        losses = [
            f"{statistics.fmean(s[b]['loss'] for s in seeds):.4g}"
            for b in ("KFAC", best)
        ]
        rows.append([name, f"{goal:.4g}", best, *cells, *losses])
    for k, values in ratios.items():
        word = "time" if k == "seconds" else "step"
        logs = [math.log(v) for v in values if 0 < v < math.inf]
        geometric = math.exp(statistics.fmean(logs)) if logs else math.inf
        results[f"geometric_mean_{word}_ratio"] = geometric
        results[f"worst_{word}_ratio"] = max(values)
        print(
            f"\n{word} ratios: geometric mean {geometric:.2f} of the {len(logs)} that "
            f"are finite, of {len(values)}; worst {max(values):.2f}"
        )
    header = ["problem", "loss", "best", "steps KFAC", "steps best", "s KFAC", "s best"]
    header += ["step ratio", "time ratio", "end KFAC", "end best"]
    comparison.print_table(header, rows)


def write(results):
    """The JSON file and the picture of loss against seconds."""
    device = "gpu" if _has_gpu() else "cpu"
    default = pathlib.Path(__file__).parent / "results"
    folder = pathlib.Path(args.results) if args.results else default
    folder.mkdir(exist_ok=True)
    stem = folder / f"panel-{results['backend']}-{device}"
    strict = json.loads(json.dumps(results), parse_constant=lambda c: c)
    stem.with_suffix(".json").write_text(json.dumps(strict, indent=1) + "\n")
    draw(results, stem.with_suffix(".png"))


def _has_gpu():
    if keras.backend.backend() == "torch":
        import torch

        return torch.cuda.is_available()
    return any("gpu" in str(d).lower() for d in keras.distribution.list_devices())


def draw(results, path):
    """One picture for each problem, its first seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    problems = results["problems"]
    columns = min(3, len(problems))
    lines = -(-len(problems) // columns)
    figure, axes = plt.subplots(
        lines,
        columns,
        figsize=(4 * columns, 3 * lines),
        squeeze=False,
        layout="constrained",
    )
    for place, (name, found) in zip(axes.flat, problems.items(), strict=False):
        for optimizer, run in found["seeds"][0].items():
            _, seconds, losses = zip(*run["curve"], strict=True)
            width = 2.0 if optimizer == "KFAC" else 1.0
            place.plot(seconds, losses, label=optimizer, linewidth=width)
        place.axhline(found["target"], color="grey", linestyle=":")
        place.set(title=name, yscale="log", xlabel="seconds", ylabel="loss")
    axes.flat[0].legend()
    figure.savefig(path, dpi=100)
    plt.close(figure)


if __name__ == "__main__":
    main()
