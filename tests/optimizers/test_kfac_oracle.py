"""Whole steps of KFAC against the dense oracle, through `train_on_batch`."""

import numpy as np
import problems
import pytest

import keras_secondorder as kso

# Ten thousand times float32's rounding error is what products with inverses at a
# condition number of about 100, three steps in a row, can lose.
STEP_RTOL = 1e-4
# The factors of one batch are sums of a few products, without an inverse.
FACTOR_RTOL = 1e-5


@pytest.fixture(scope="module", params=list(problems.KFAC_CASES))
def run(request):
    """`(what KFAC did, what the oracle did, the oracle's first factors)`."""
    case = problems.KFAC_CASES[request.param]
    expected = case.expected()
    reports, first = [], None
    batches = problems.classification().batches()
    for i in case.batches:
        batch = batches[i]
        weights = batch.sample_weight.astype(float) / len(batch.x)
        reports.append(expected.step(batch.x, case.targets(batch)[1], weights))
        first = first or expected.average
    return problems.kfac_run(request.param), reports, first


@pytest.mark.parametrize("step", range(3))
def test_updates_equal_the_oracle(run, step):
    ours, reports, _ = run
    error = np.linalg.norm(ours["updates"][step] - reports[step].update)
    assert error <= STEP_RTOL * np.linalg.norm(reports[step].update)


@pytest.mark.parametrize(
    ("log", "field"),
    [
        ("learning_rate", "alpha"),
        ("momentum", "mu"),
        ("damping", "damping"),
        ("gamma", "gamma"),
        ("rho", "rho"),
    ],
)
def test_logs_equal_the_oracle(run, log, field):
    ours, reports, _ = run
    expected = [getattr(report, field) for report in reports]
    np.testing.assert_allclose(ours[log], expected, rtol=STEP_RTOL, atol=1e-7)


def test_reports_equal_the_oracle(run):
    """What is measured every few steps stays as it was in between."""
    ours, reports, _ = run
    expected, measured = [], [np.nan] * 3
    for i, r in enumerate(reports):
        before = reports[i - 1].update if i else np.zeros_like(r.update)
        if not np.isnan(r.rho):
            measured = [r.predicted, r.actual, r.quadratic]
        expected.append(
            [
                np.linalg.norm(r.gradient),
                np.linalg.norm(r.update),
                cosine(r.update, r.gradient),
                cosine(r.update, before),
                *measured,
            ]
        )
    # The cosine of the first step is 0, which stands for what is not known.
    expected[0][3] = np.nan
    np.testing.assert_allclose(ours["reports"], expected, rtol=3e-3, atol=1e-6)


def cosine(u, v):
    return u @ v / max(np.linalg.norm(u) * np.linalg.norm(v), 1e-30)


def test_first_factors_are_the_first_batch_r6(run):
    """R6: no trace of an initial identity in the first step's factors."""
    ours, _, first = run
    expected = np.concatenate([f.ravel() for pair in first for f in pair])
    np.testing.assert_allclose(
        ours["factors"], expected, rtol=0, atol=FACTOR_RTOL * np.abs(expected).max()
    )


def test_the_cases_reach_every_branch():
    """The comparison above says something only where the rules do something."""
    reports = {}
    for name, case in problems.KFAC_CASES.items():
        expected = case.expected()
        batches = problems.classification().batches()
        reports[name] = [
            expected.step(
                batches[i].x,
                case.targets(batches[i])[1],
                batches[i].sample_weight / len(batches[i].x),
            )
            for i in case.batches
        ]
    assert all(r.alpha < 0.3 for r in reports["trust region"])  # the bound is active
    assert all(abs(r.mu) > 1e-3 for r in reports["adaptive"][1:])
    levenberg = reports["levenberg"]
    assert levenberg[2].gamma != levenberg[1].gamma  # the trial at T2 = 2 was won
    assert levenberg[1].damping != levenberg[0].damping


def test_gamma_follows_lambda_where_no_trials_are_made():
    """A rule without a quadratic model has no trials, so gamma is sqrt(lambda)."""
    model = problems.sequential([problems.dense(1)])
    rule = kso.AdaptiveDamping(1.0, every=1)
    model.compile(optimizer=kso.KFAC(damping=rule), loss="mse")
    batch = problems.classification().batches()[0]
    for _ in range(2):
        logs = model.train_on_batch(batch.x, batch.column, return_dict=True)
    assert logs["damping"] != 1.0
    np.testing.assert_allclose(logs["gamma"], logs["damping"] ** 0.5, rtol=1e-6)
