"""The same numbers in, the same three steps out, on the three backends."""

import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
import problems
import pytest

# Two float32 runs that each keep to 1e-4 of the oracle (tests/optimizers).
PARITY_RTOL = 1e-4
TESTS = pathlib.Path(__file__).parent
# Each backend keeps to the oracle in all cases; these have all rules and forms.
CASES = ["trust region, levenberg", "eigenvalue corrected", "tridiagonal"]

pytestmark = pytest.mark.skipif(
    keras.backend.backend() != "jax",
    reason="one backend's run starts the other two",
)


@pytest.fixture(scope="module")
def jax_runs():
    return {name: problems.kfac_run(name) for name in CASES}


@pytest.fixture(scope="module", params=["tensorflow", "torch"])
def other_runs(request, tmp_path_factory):
    pytest.importorskip(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    path = [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    subprocess.run(
        [sys.executable, str(TESTS / "problems.py"), folder, *CASES],
        env={
            **os.environ,
            "KERAS_BACKEND": request.param,
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
        },
        check=True,
    )
    return {
        name: dict(np.load(folder / f"{number}.npz"))
        for number, name in enumerate(CASES)
    }


@pytest.mark.parametrize("name", CASES)
def test_updates_and_logs_agree(name, jax_runs, other_runs):
    ours, theirs = jax_runs[name], other_runs[name]
    for a, b in zip(ours["updates"], theirs["updates"], strict=True):
        assert np.linalg.norm(a - b) <= PARITY_RTOL * np.linalg.norm(a)
    for log in problems.LOGS:
        np.testing.assert_allclose(
            theirs[log], ours[log], rtol=PARITY_RTOL, atol=1e-7, err_msg=log
        )
