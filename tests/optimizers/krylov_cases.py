"""Steps of the optimizers that solve by products, ours and the oracle's."""

import functools
from typing import NamedTuple

import keras
import numpy as np
import oracle_steps
import problems

import keras_secondorder as kso

ROWS = 12  # of each of the two batches
LOGITS = keras.losses.CategoricalCrossentropy(from_logits=True)
BINARY = keras.losses.BinaryCrossentropy(from_logits=True)
SOLVED = {"solver_iterations": 120, "rtol": 1e-6}
METRIC_ROWS = 30


class Case(NamedTuple):
    """Two steps of one optimizer on one small network.

    Attributes:
        ours: Makes the optimizer.
        oracle: Makes the oracle from `(layers, kind)`.
        loss: Keras loss.
        kind: The same loss by the oracle's name.
        outputs: Units of the last layer.
        l2: L2 penalty on kernels.
    """

    ours: object
    oracle: object
    loss: object = LOGITS
    kind: str = "ce_logits"
    outputs: int = 3
    l2: float = 0.0

    def model(self):
        penalty = keras.regularizers.L2(self.l2) if self.l2 else None
        hidden = problems.dense(5, "tanh", kernel_regularizer=penalty, name="hidden")
        last = problems.dense(self.outputs, kernel_regularizer=penalty, name="last")
        return problems.sequential([hidden, last], scale=0.4)

    def targets(self, data):
        if self.kind == "mse":
            return data.x[:, : self.outputs] ** 2
        return data.one_hot[:, : self.outputs]


def metric_data():
    """Rows beside those of the batches."""
    return problems.classification(METRIC_ROWS, seed=7)


def hessian_free(learning_rate=1.0, damping_matrix="identity", **options):
    """A case from arguments of `HessianFree`."""
    case = {
        k: options.pop(k) for k in ("loss", "kind", "outputs", "l2") if k in options
    }
    options = {"cg_iterations": 8, "cg_tolerance": 1e-9, **options}

    def theirs(layers, kind):
        return oracle_steps.HessianFree(
            layers,
            kind,
            learning_rate,
            curvature=options.get("curvature", "gauss_newton"),
            diagonal=damping_matrix == "diagonal",
            preconditioner=options["preconditioner"],
            structural=options.get("structural_damping", 0.0),
            iterations=options["cg_iterations"],
            epsilon=options["cg_tolerance"],
            warm_start=options.get("warm_start", 0.95),
        )

    def ours():
        return kso.HessianFree(learning_rate, damping_matrix=damping_matrix, **options)

    return Case(ours, theirs, **case)


def natural_gradient(metric="fisher", data=None, **options):
    """A case from arguments of `NaturalGradient`; `data`: "labelled" or "inputs"."""
    names = ("loss", "kind", "outputs", "l2")
    case = {k: options.pop(k) for k in names if k in options}
    case = Case(None, None, **case)
    own = metric_data()
    pair = {None: None, "inputs": own.x, "labelled": (own.x, case.targets(own))}[data]
    theirs = None if data is None else (own.x, case.targets(own))

    return case._replace(
        ours=lambda: kso.NaturalGradient(
            metric=metric, metric_data=pair, **SOLVED, **options
        ),
        oracle=lambda layers, kind: oracle_steps.NaturalGradient(
            layers, kind, metric=metric, data=theirs
        ),
    )


def subspace(basis_size, bfgs_iterations, curvature, **case):
    return Case(
        lambda: kso.KrylovSubspaceDescent(
            curvature=curvature, basis_size=basis_size, bfgs_iterations=bfgs_iterations
        ),
        lambda layers, kind: oracle_steps.KrylovSubspaceDescent(
            layers, kind, basis_size, bfgs_iterations, curvature
        ),
        **case,
    )


MSE = {"loss": "mse", "kind": "mse", "outputs": 2}
ONE = {"loss": BINARY, "kind": "bce_logits", "outputs": 1}
SUM = {"loss": keras.losses.CategoricalCrossentropy(from_logits=True, reduction="sum")}
CASES = {
    "hf": hessian_free(preconditioner=None, l2=0.02),
    "hf, solved": hessian_free(
        preconditioner=None, cg_iterations=100, cg_tolerance=1e-30, **MSE
    ),
    "hf, empirical": hessian_free(0.5, preconditioner="empirical", warm_start=0.7),
    "hf, empirical, D": hessian_free(
        damping_matrix="diagonal", preconditioner="empirical", **MSE
    ),
    "hf, gauss_newton, D": hessian_free(
        # Few iterations: the badly scaled system makes more of float32's rounding.
        damping_matrix="diagonal",
        preconditioner="gauss_newton",
        cg_iterations=6,
        **ONE,
    ),
    "hf, fisher, structural": hessian_free(
        curvature="fisher",
        preconditioner=None,
        structural_damping=3.0,
        structural_layers=["hidden"],
        l2=0.02,
    ),
    "hf, hessian": hessian_free(curvature="hessian", preconditioner=None, l2=0.02),
    "ng": natural_gradient(l2=0.02),
    "ng, cg": natural_gradient(solver="cg", data="inputs", **MSE),
    "ng, sum": natural_gradient(data="inputs", **SUM),
    "ng, covariance": natural_gradient(metric="covariance"),
    "ng, covariance, labelled": natural_gradient(
        metric="covariance", solver="cg", data="labelled", **ONE
    ),
    "ksd": subspace(4, 4, "gauss_newton", l2=0.02),
    "ksd, fisher": subspace(3, 5, "fisher", **MSE),
}
LOGS = ("damping", "rho", "step_length", "cg_iterate")
PARITY = ("hf, empirical", "ng", "ksd")


def batches(case):
    data = problems.classification(2 * ROWS, seed=3)
    return [data.rows(slice(i, i + ROWS)) for i in (0, ROWS)]


@functools.cache
def run(name: str) -> dict:
    """Two steps by `train_on_batch`: "updates" (2, P), and the logs that there are."""
    case = CASES[name]
    model = case.model()
    model.compile(optimizer=case.ours(), loss=case.loss)
    updates, logs = [], []
    before = problems.parameters(model)
    for batch in batches(case):
        logs.append(
            model.train_on_batch(
                batch.x, case.targets(batch), batch.sample_weight, return_dict=True
            )
        )
        after = problems.parameters(model)
        updates.append(after - before)
        before = after
    return {
        "updates": np.stack(updates),
        **{
            key: np.array([float(step[key]) for step in logs])
            for key in LOGS
            if key in logs[0]
        },
    }


def expected(name: str) -> list:
    """What the oracle does in the same two steps."""
    case = CASES[name]
    theirs = case.oracle(problems.oracle_layers(case.model()), case.kind)
    sums = getattr(case.loss, "reduction", "") == "sum"
    reports = []
    for batch in batches(case):
        w = batch.sample_weight.astype(float) / (1.0 if sums else ROWS)
        reports.append(theirs.step(batch.x, case.targets(batch), w))
    return reports


if __name__ == "__main__":
    import sys

    target, *names = sys.argv[1:]
    for number, case_name in enumerate(names):
        np.savez(f"{target}/{number}.npz", **run(case_name))
