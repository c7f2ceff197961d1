"""The paths that optimizers take through two parameters, drawn on the loss.

Left, the one-hidden-unit autoencoder of Pascanu and Bengio (2014), figure 1, whose
reconstruction of a number x is w sigmoid(w x + b) + b: Newton's method, natural
gradient descent, TONGA and gradient descent. Insets show the Kullback-Leibler
divergence around points of the natural gradient's path, and where each method would
go from there: the natural gradient measures the length of a step by it. The four
numbers and the starting point are ours.

Right, Ole Winther's example C = (w1 w2 - 1.5)^2 + 0.04 (w1^2 + w2^2), which is a chain
of two linear units with a penalty: gradient descent, momentum, and Newton's method
with eigenvalues as they are and with their absolute values.

Each epoch is one step on the full batch.
"""

import comparison

# Selects the backend, so it has to come before Keras is imported.
args = comparison.parse_arguments(__doc__, epochs=60, batch_size=4)

import keras
import numpy as np
from keras import ops

import keras_secondorder as kso

NUMBERS = np.array([[-1.5], [-0.5], [0.8], [2.0]], "float32")
RATE = 0.2  # of the methods whose full step would leave nothing to see
METRIC_DAMPING = 1e-3


class TiedUnit(keras.layers.Layer):
    """An autoencoder of one number with one hidden unit: `w sigmoid(w x + b) + b`."""

    def build(self, input_shape):
        """Creates `w` and `b`."""
        self.w = self.add_weight(shape=(1,), name="w")
        self.b = self.add_weight(shape=(1,), name="b")

    def call(self, inputs):
        """Reconstructs the numbers."""
        return self.w * ops.sigmoid(self.w * inputs + self.b) + self.b


def autoencoder():
    """Builds the autoencoder.

    Returns:
        The model; its parameters are (w, b).
    """
    return keras.Sequential([keras.Input((1,)), TiedUnit()])


def chain():
    """Builds a chain of two linear units, penalized so that its loss is C.

    Returns:
        The model; its parameters are (w1, w2).
    """
    units = [
        keras.layers.Dense(
            1, use_bias=False, kernel_regularizer=keras.regularizers.L2(0.04)
        )
        for _ in range(2)
    ]
    return keras.Sequential([keras.Input((1,)), *units])


# Of each problem: its model, the data, where to start, what to draw, the optimizers.
PROBLEMS = {
    "autoencoder": {
        "build": autoencoder,
        "data": (NUMBERS, NUMBERS),
        "start": (1.6, 1.6),
        "window": ((0.5, 5.0), (-2.2, 2.0)),
        "names": ("w", "b"),
        "legend": "lower left",
        "optimizers": {
            "gradient descent": lambda: keras.optimizers.SGD(RATE),
            "Newton": lambda: kso.Newton(RATE),
            "natural gradient": lambda: kso.NaturalGradient(
                RATE, damping=METRIC_DAMPING
            ),
            # Many columns: the covariance is that of the examples, not of their signs.
            "TONGA": lambda: kso.TONGA(
                RATE, METRIC_DAMPING, rank=2, interval=1, columns=30, blocks="full"
            ),
        },
    },
    "Winther": {
        "build": chain,
        "data": (np.ones((1, 1), "float32"), np.full((1, 1), 1.5, "float32")),
        "start": (0.3, 2.2),
        "window": ((0.0, 2.6), (0.6, 4.2)),
        "names": ("w1", "w2"),
        "legend": "upper right",
        "optimizers": {
            "gradient descent": lambda: keras.optimizers.SGD(0.05),
            "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.8),
            "Newton, as it is": lambda: kso.Newton(
                damping=0.0, negative_curvature="keep"
            ),
            "Newton, |e|": lambda: kso.Newton(),
        },
    },
}


class Problem:
    """Two parameters, a loss, and steps on it.

    Args:
        build: A function that makes the model.
        data: Inputs and targets.
    """

    def __init__(self, build, data):
        self.data = data
        self.model = build()
        self.model.compile(loss="mse")
        self._build = build

    def path(self, optimizer, start, steps):
        """Takes full-batch steps.

        Args:
            optimizer: A Keras optimizer.
            start: Where to start, a pair.
            steps: Their number.

        Returns:
            The points, an array of shape (steps + 1, 2).
        """
        model = self._build()
        self._put(model, start)
        model.compile(optimizer=optimizer, loss="mse")
        points = [start]
        for _ in range(steps):
            model.train_on_batch(*self.data)
            points.append(self._read(model))
        return np.array(points)

    def loss(self, point):
        """The loss at a point, a float."""
        x, y = self.data
        self._put(self.model, point)
        loss = self.model.compute_loss(x, y, self.model(x))
        return float(ops.convert_to_numpy(loss))

    def outputs(self, point):
        """What the network says at a point, an array."""
        self._put(self.model, point)
        return ops.convert_to_numpy(self.model(self.data[0]))

    @staticmethod
    def _put(model, point):
        shapes = [tuple(v.shape) for v in model.trainable_variables]
        values = [np.full(s, p) for s, p in zip(shapes, point, strict=True)]
        model.set_weights(values)

    @staticmethod
    def _read(model):
        return tuple(float(np.squeeze(w)) for w in model.get_weights())


def settled(losses, lowest):
    """How many steps came before the loss stayed near the lowest.

    Args:
        losses: The loss at each point of a path.
        lowest: The lowest loss of all paths.

    Returns:
        The number of steps as a string, "-" where it did not.
    """
    far = np.flatnonzero(~(np.array(losses) < lowest + 0.01 * (losses[0] - lowest)))
    steps = far[-1] + 1 if len(far) else 0
    return str(steps) if steps < len(losses) else "-"


def kl_inset(axes, problem, center, steps, colors):
    """Draws the divergence around a point, and where the methods go from there.

    With squared errors the network says a Gaussian of unit variance for each number,
    so the divergence is half the squared difference of the outputs.

    Args:
        axes: Where to draw.
        problem: A `Problem`.
        center: The point.
        steps: Dictionary from a method to its step from there.
        colors: Dictionary from a method to its color.
    """
    radius, here = 0.5, problem.outputs(center)
    offsets = np.linspace(-radius, radius, 15)
    divergence = [
        [
            0.5 * np.mean((problem.outputs(center + (i, j)) - here) ** 2)
            for i in offsets
        ]
        for j in offsets
    ]
    levels = np.square(np.arange(1, 9)) / 200.0  # rings of equal distance
    axes.contourf(offsets, offsets, divergence, levels, cmap="Greys", extend="both")
    for name, step in steps.items():
        tip = 0.8 * radius * step / max(np.linalg.norm(step), 1e-12)
        axes.annotate(
            "",
            tip,
            (0, 0),
            arrowprops={"arrowstyle": "->", "color": colors[name], "lw": 1.5},
        )
    axes.set(xticks=[], yticks=[], xlim=(-radius, radius), ylim=(-radius, radius))


def draw(axes, problem, case, paths, grid):
    """Draws a problem's loss and the paths.

    Args:
        axes: Where to draw.
        problem: A `Problem`.
        case: Its entry in `PROBLEMS`.
        paths: Dictionary from a method to its points.
        grid: Points of the picture along each side.

    Returns:
        Dictionary from a method to its color.
    """
    (left, right), (low, high) = case["window"]
    horizontal, vertical = np.linspace(left, right, grid), np.linspace(low, high, grid)
    loss = np.array([[problem.loss((i, j)) for i in horizontal] for j in vertical])
    levels = np.geomspace(1.02 * loss.min(), loss.max(), 25)
    axes.contour(
        horizontal, vertical, loss, levels, colors="0.75", linewidths=0.7, zorder=0
    )
    colors = {}
    for number, (name, points) in enumerate(paths.items()):
        colors[name] = f"C{number}"
        axes.plot(*points.T, ".-", color=colors[name], label=name, ms=4, lw=1.2)
    axes.plot(*case["start"], "ko", ms=5)
    axes.set(
        xlim=(left, right),
        ylim=(low, high),
        xlabel=case["names"][0],
        ylabel=case["names"][1],
    )
    axes.legend(loc=case["legend"])
    return colors


def picture(path, problems, paths):
    """Saves the picture of both problems.

    Args:
        path: The image's file name.
        problems: Dictionary from a name to a `Problem`.
        paths: Dictionary from a name to a dictionary from a method to its points.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(13, 6), layout="constrained")
    grid = 15 if args.smoke else 61
    for place, (name, case) in zip(axes, PROBLEMS.items(), strict=True):
        problem = problems[name]
        colors = draw(place, problem, case, paths[name], grid)
        place.set_title(name)
        if name != "autoencoder":
            continue
        natural = paths[name]["natural gradient"]
        for number, index in enumerate((0, 3, 8)):
            center = natural[min(index, len(natural) - 1)]
            steps = {
                method: np.diff(problem.path(build(), tuple(center), 1), axis=0)[0]
                for method, build in case["optimizers"].items()
            }
            inset = place.inset_axes((0.75, 0.73 - 0.25 * number, 0.23, 0.23))
            kl_inset(inset, problem, center, steps, colors)
            inset.set_ylabel(f"KL at {number + 1}", fontsize=8, labelpad=2)
            place.annotate(
                str(number + 1),
                center,
                xytext=(5, 5),
                textcoords="offset points",
                fontweight="bold",
            )
    figure.savefig(path, dpi=150)
    plt.close(figure)
    print(f"\nSaved {path}")


def main():
    """Follows all paths, prints a table, saves the picture."""
    print(f"Backend: {keras.config.backend()}, {args.epochs} steps each")
    rows, problems, paths = [], {}, {}
    for name, case in PROBLEMS.items():
        problem = problems[name] = Problem(case["build"], case["data"])
        paths[name] = {
            method: problem.path(build(), case["start"], args.epochs)
            for method, build in case["optimizers"].items()
        }
        losses = {
            method: [problem.loss(point) for point in points]
            for method, points in paths[name].items()
        }
        lowest = min(min(values) for values in losses.values())
        for method, points in paths[name].items():
            end = ", ".join(f"{value:.3f}" for value in points[-1])
            steps = settled(losses[method], lowest)
            loss = f"{losses[method][-1]:.5f}"
            rows.append([method, name, f"({end})", loss, steps])
    header = ["optimizer", "problem", "end point", "loss", "steps to 1%"]
    comparison.print_table(header, rows)
    print(
        "Steps to 1%: until 99% of the way down, to the lowest loss of all paths of the"
        " problem,\nis done for good; - where it is not."
    )
    path = args.plot or "paths.png"
    if path != "none":
        picture(path, problems, paths)


if __name__ == "__main__":
    main()
