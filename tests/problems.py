"""Named small cases that the tests share.

The classification set has what breaks optimizers: 6 inputs of which one column is zero
and one a copy of another, 3 classes, 23 rows in batches of 8 (the last has 7), and one
row of sample weight 0; labels in every shape that Keras takes.
"""

import functools
from typing import NamedTuple

import keras
import numpy as np
import oracle
import oracle_eigenbasis
import oracle_kfac
import oracle_tridiagonal

import keras_secondorder as kso
from keras_secondorder import autodiff
from keras_secondorder.curvature import BlockDiagonal, batch_factors
from keras_secondorder.likelihoods import loss_weights_of
from keras_secondorder.objective import Objective
from keras_secondorder.optimizers import step_report

FEATURES, CLASSES, ROWS, BATCH = 6, 3, 23, 8
ZERO_COLUMN, COPY, COPIED, ZERO_ROW = 2, 4, 1, 5


class Data(NamedTuple):
    """Rows of the shared set; `x`, then its labels in three shapes, then weights."""

    x: np.ndarray
    classes: np.ndarray  # (N,)
    column: np.ndarray  # (N, 1)
    one_hot: np.ndarray  # (N, CLASSES)
    sample_weight: np.ndarray  # (N,), one of them 0

    def rows(self, index):
        return Data(*(field[index] for field in self))

    def batches(self):
        return [self.rows(slice(i, i + BATCH)) for i in range(0, len(self.x), BATCH)]


def classification(rows: int = ROWS, seed: int = 0) -> Data:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, FEATURES)).astype("float32")
    x[:, ZERO_COLUMN] = 0.0
    x[:, COPY] = x[:, COPIED]
    classes = rng.integers(0, CLASSES, rows)
    weight = rng.uniform(0.5, 2.0, rows).astype("float32")
    weight[ZERO_ROW % rows] = 0.0
    one_hot = np.eye(CLASSES, dtype="float32")[classes]
    return Data(x, classes, classes[:, None], one_hot, weight)


def dense(units, activation=None, **kwargs):
    return keras.layers.Dense(units, activation=activation, **kwargs)


class UnknownDense(keras.layers.Dense):
    """A layer that no wrapper knows, as its `call` is its own."""

    def call(self, inputs):
        return super().call(inputs)


def sequential(layers, inputs=(FEATURES,), seed=1, scale=0.6):
    """A Sequential model whose weights are the same on every backend."""
    model = keras.Sequential([keras.Input(inputs), *layers])
    fill(model, seed, scale)
    return model


def fill(model, seed=1, scale=0.6):
    """Set all trainable weights to normal numbers from NumPy, biases as well."""
    rng = np.random.default_rng(seed)
    for v in model.trainable_variables:
        v.assign((scale * rng.normal(size=v.shape)).astype("float32"))


def classifier(head=None, seed=1):
    """6-5-3 with a tanh layer; the loss goes with `head`.

    Args:
        head: "logits", "softmax" (in the last layer) or "softmax layer".
    """
    last = [dense(CLASSES, "softmax" if head == "softmax" else None)]
    if head == "softmax layer":
        last.append(keras.layers.Softmax())
    return sequential([dense(5, "tanh"), *last], seed=seed)


def oracle_layers(model) -> list:
    """The Dense layers of a Sequential model, for the oracle, in float64."""
    result = []
    for layer in model.layers:
        if isinstance(layer, keras.layers.Softmax):
            result[-1] = result[-1]._replace(activation="softmax")
            continue
        W = keras.ops.convert_to_numpy(layer.kernel).astype(float)
        if layer.use_bias:
            W = np.vstack([W, keras.ops.convert_to_numpy(layer.bias)])
        result.append(
            oracle.Layer(
                W,
                layer.activation.__name__,
                layer.use_bias,
                float(getattr(layer.kernel_regularizer, "l2", 0.0)),
                float(getattr(layer.bias_regularizer, "l2", 0.0)),
            )
        )
    return result


def parameters(model) -> np.ndarray:
    """All trainable variables as one vector: kernel, bias, kernel, ..."""
    values = [keras.ops.convert_to_numpy(v) for v in model.trainable_variables]
    return np.concatenate([v.ravel() for v in values])


LOSSES = {  # of the three heads of `classifier`; labels one-hot
    "logits": keras.losses.CategoricalCrossentropy(from_logits=True),
    "softmax": keras.losses.CategoricalCrossentropy(),
    "softmax layer": keras.losses.CategoricalCrossentropy(),
}


# --- the curvature of one batch, computed eagerly -----------------------------------


def add_variable(shape, initializer="zeros", dtype=None, name=None):
    """As an optimizer's, for blocks without one."""
    return keras.Variable(keras.ops.zeros(shape, dtype), trainable=False, name=name)


def blocks_of(model, **plan) -> list:
    """The curvature blocks of a model, without an optimizer."""

    return BlockDiagonal(model, add_variable, **plan).blocks


def objective_of(model, x, y, sample_weight=None, blocks=()):
    """The objective of one batch of a compiled model, with NumPy data."""
    return objective_of_tensors(model, *prepared(model, x, y, sample_weight), blocks)


def prepared(model, x, y, sample_weight):
    """The data as tensors, and the model ready for them."""
    x, y, sample_weight = keras.tree.map_structure(
        lambda a: None if a is None else keras.ops.convert_to_tensor(a),
        (x, y, sample_weight),
    )
    # Keras makes its metrics at the first call, which may not be in a scope.
    y_pred = model(x)
    model.compute_loss(x, y, y_pred, sample_weight)
    model.compute_metrics(x, y, y_pred, sample_weight)
    return x, y, sample_weight


def objective_of_tensors(model, x, y, sample_weight, blocks):
    wrappers = tuple(b.wrapper for b in blocks if b.wrapper is not None)
    return Objective(model, x, y, sample_weight, wrappers, loss_weights_of(model))


def statistics_of(
    model, x, y, sample_weight=None, fisher="exact", fraction=1.0, seed=0, **plan
) -> list:
    """The factors of one batch for every block, as float64 arrays."""
    blocks = blocks_of(model, **plan)
    return factors_of(blocks, model, x, y, sample_weight, fisher, fraction, seed)


def factors_of(
    blocks, model, x, y, sample_weight=None, fisher="exact", fraction=1.0, seed=0
) -> list:
    """The same for blocks that exist."""

    @autodiff.compiled
    def compute(data, counter):
        objective = objective_of_tensors(model, *data, blocks)
        linear = objective.linearize(taps=True)
        return batch_factors(objective, linear, blocks, fisher, fraction, seed, counter)

    with autodiff.no_grad():
        counter = keras.ops.convert_to_tensor(0, dtype="int32")
        factors = compute(prepared(model, x, y, sample_weight), counter)
    return keras.tree.map_structure(
        lambda f: keras.ops.convert_to_numpy(f).astype(float), factors
    )


# --- three steps of K-FAC, for the oracle and for the comparison of backends --------


class KfacCase(NamedTuple):
    """One optimizer on one small network.

    Attributes:
        widths: Units of the layers.
        activations: Their activations.
        loss: Keras loss.
        kind: The same loss by the oracle's name.
        options: Arguments of the oracle's `Kfac`; the package's follow from them.
        l2: L2 penalty on kernels, and on biases.
        batches: Which of the three batches each step takes.
    """

    widths: tuple
    activations: tuple
    loss: object
    kind: str
    options: dict
    l2: tuple = (0.0, 0.0)
    batches: tuple = (0, 1, 0)

    def model(self):
        def penalty(l2):
            return keras.regularizers.L2(l2) if l2 else None

        layers = [
            dense(
                units,
                activation,
                kernel_regularizer=penalty(self.l2[0]),
                bias_regularizer=penalty(self.l2[1]),
            )
            for units, activation in zip(self.widths, self.activations, strict=True)
        ]
        return sequential(layers)

    def optimizer(self):
        o = self.options
        damping = o["damping"]
        if "damping_every" in o:
            damping = kso.AdaptiveDamping(
                damping,
                every=o["damping_every"],
                gamma_every=o.get("gamma_every"),
                relative=o.get("relative", False),
            )
        bound = o.get("relative_step")
        return kso.KFAC(
            learning_rate=o.get("learning_rate", "adaptive"),
            momentum=o.get("momentum", "adaptive"),
            norm_constraint=o.get("norm_constraint"),
            relative_step=bound and kso.RelativeStep(*bound),
            damping=damping,
            fisher="exact",
            statistics_fraction=1.0,
            quadratic_fraction=1.0,
            statistics_every=1,
            inverse_every=1,
            **FORMS[o.get("form", "factored")][0],
        )

    def expected(self):
        """The oracle of the same steps."""
        options = {k: v for k, v in self.options.items() if k != "form"}
        _, form = FORMS[self.options.get("form", "factored")]
        return form(oracle_layers(self.model()), self.kind, **options)

    def targets(self, batch):
        """`(for Keras, for the oracle)`."""
        if self.kind == "mse":
            y = batch.x[:, :2] ** 2
            return y, y
        if self.kind == "poisson":
            y = (batch.column + 1).astype("float32")
            return y, y
        if self.kind == "bce":
            return batch.one_hot, batch.one_hot
        return batch.classes, batch.one_hot


# Arguments of the package's `KFAC`, and the oracle of the same form.
FORMS = {
    "factored": ({}, oracle_kfac.Kfac),
    "tridiagonal": ({"approximation": "block_tridiagonal"}, oracle_tridiagonal.Kfac),
    "exact": ({"tikhonov": "exact"}, oracle_eigenbasis.ExactKfac),
    "corrected": (
        {"approximation": "eigenvalue_corrected", "tikhonov": "exact"},
        oracle_eigenbasis.CorrectedKfac,
    ),
}


def _kfac_cases():
    softmax = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    trust = {"learning_rate": 0.3, "momentum": 0.9, "damping": 0.1}
    return {
        # The bound 0.02 shortens every step; the last batch has one row less.
        "trust region": KfacCase(
            (5, 3), ("tanh", "linear"), softmax, "ce_logits",
            {**trust, "norm_constraint": 0.02}, (0.01, 0.003), (0, 1, 2),
        ),
        "adaptive": KfacCase(
            (4, 3), ("relu", "sigmoid"), "binary_crossentropy", "bce",
            {"damping": 0.3},
        ),
        "levenberg": KfacCase(
            (4, 3, 2), ("tanh", "sigmoid", "linear"), "mse", "mse",
            {"damping": 0.5, "damping_every": 1, "gamma_every": 2}, (0.02, 0.0),
        ),
        "trust region, levenberg": KfacCase(
            (4, 1), ("tanh", "exponential"), "poisson", "poisson",
            {**trust, "damping": 0.5, "damping_every": 1, "relative": True,
             "norm_constraint": 0.02, "relative_step": (0.02, 2)},
        ),
        "exact tikhonov": KfacCase(
            (4, 3), ("tanh", "sigmoid"), "binary_crossentropy", "bce",
            {"damping": 0.5, "damping_every": 1, "gamma_every": 2, "form": "exact"},
            (0.02, 0.0),
        ),
        "eigenvalue corrected": KfacCase(
            (5, 3), ("tanh", "linear"), softmax, "ce_logits",
            {**trust, "damping_every": 1, "relative": True, "relative_step": (0.02, 2),
             "form": "corrected"}, (0.01, 0.003),
        ),
        # One row of weight 0, columns that are zero or copies. A trial of gamma in the
        # third step.
        "tridiagonal": KfacCase(
            (4, 3, 5, 3), ("tanh", "sigmoid", "tanh", "linear"), softmax, "ce_logits",
            {"damping": 0.3, "damping_every": 1, "gamma_every": 2, "relative": True,
             "form": "tridiagonal"},
            (0.01, 0.0),
        ),
    }  # fmt: skip


KFAC_CASES = _kfac_cases()
LOGS = ("learning_rate", "momentum", "damping", "gamma", "rho")


@functools.cache
def kfac_run(name: str) -> dict:
    """Three steps by `train_on_batch`, as arrays.

    Returns:
        "updates" (3, P); "reports" (3, entries of a step report); one array of 3 for
        each of LOGS; "factors", the flattened [A, G] of all layers after the first
        step.
    """
    case = KFAC_CASES[name]
    model = case.model()
    model.compile(optimizer=case.optimizer(), loss=case.loss)
    batches = classification().batches()
    updates, logs, factors, reports = [], [], None, []
    # Without the corrected eigenvalues, which start as what the factors make them.
    kept = 2 if case.options.get("form") == "corrected" else None
    before = parameters(model)
    for i in case.batches:
        y, _ = case.targets(batches[i])
        logs.append(
            model.train_on_batch(
                batches[i].x, y, batches[i].sample_weight, return_dict=True
            )
        )
        reports.append(step_report.read(model.optimizer))
        if factors is None:
            factors = [
                np.array(keras.ops.convert_to_numpy(f)).ravel()
                for block in model.optimizer.blocks
                for f in block.factors[:kept]
            ]
        after = parameters(model)
        updates.append(after - before)
        before = after
    return {
        "updates": np.stack(updates),
        "factors": np.concatenate(factors),
        "reports": np.array(
            [[r.get(name, np.nan) for name in step_report.ENTRIES] for r in reports]
        ),
        **{
            key: np.array([float(step.get(key, np.nan)) for step in logs])
            for key in LOGS
        },
    }


if __name__ == "__main__":
    import sys

    target, *names = sys.argv[1:]
    for number, case_name in enumerate(names):
        np.savez(f"{target}/{number}.npz", **kfac_run(case_name))
