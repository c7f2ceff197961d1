"""The optimizers that solve by products, by name, and small things the tests share."""

import numpy as np
from training.loop import arrays

import keras_secondorder as kso

# The same sums in another order, or from another compiler, over a few steps of solvers
# that stop by their residuals.
RTOL = 1e-3
BATCH = 16
KINDS = {
    "hf": kso.HessianFree,
    "ng": kso.NaturalGradient,
    "ksd": kso.KrylovSubspaceDescent,
}
OPTIMIZERS = {
    **KINDS,
    "kronecker": lambda **kwargs: kso.HessianFree(preconditioner="kronecker", **kwargs),
}
SMALL = {
    "hf": {"cg_iterations": 4},
    "kronecker": {"cg_iterations": 4},
    "ng": {"solver_iterations": 4},
    "ksd": {"basis_size": 3, "bfgs_iterations": 3},
}


def finite(model):
    """All weights, and all optimizer variables that are not scalars."""
    variables = [*model.weights, *model.optimizer.variables]
    return all(np.isfinite(a).all() for a in arrays(variables) if a.size > 1)


def flat_step(model, before):
    after = arrays(model.weights)
    return np.concatenate([(a - b).ravel() for a, b in zip(after, before, strict=True)])
