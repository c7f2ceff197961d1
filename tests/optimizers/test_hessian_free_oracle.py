"""Whole steps of the optimizers that solve by products, against dense matrices."""

import numpy as np
import pytest
from optimizers import krylov_cases

# Ten thousand times float32's rounding: eight CG steps, or a solve with a condition of
# about a hundred, and a second step from where the first one ended.
STEP_RTOL = 1e-4
# MINRES-QLP and CG may stop at a residual of 1e-6, times that condition; BFGS squares
# the condition of the subspace.
LOOSE = 1e-3


def tolerance(name):
    return STEP_RTOL if name.startswith("hf") else LOOSE


@pytest.fixture(scope="module", params=list(krylov_cases.CASES))
def both(request):
    name = request.param
    return name, krylov_cases.run(name), krylov_cases.expected(name)


@pytest.mark.parametrize("step", range(2))
def test_updates_equal_the_oracle(both, step):
    name, ours, reports = both
    update = getattr(reports[step], "update", reports[step])
    error = np.linalg.norm(ours["updates"][step] - update)
    assert error <= tolerance(name) * np.linalg.norm(update)


def test_logs_equal_the_oracle(both):
    name, ours, reports = both
    if name.startswith("ksd"):
        assert "damping" not in ours
        return
    for log, field in (
        ("damping", "damping"),
        ("rho", "rho"),
        ("step_length", "step_length"),
        ("cg_iterate", "iterate"),
    ):
        # Of a solved system, rounding chooses among the last iterates.
        if log in ours and (name, log) != ("hf, solved", "cg_iterate"):
            theirs = [getattr(report, field) for report in reports]
            np.testing.assert_allclose(
                ours[log], theirs, rtol=10 * tolerance(name), atol=1e-6, err_msg=log
            )
