"""The measures that sum up spectra and gradients, on NumPy arrays alone."""

import numpy as np
import pytest

from keras_secondorder.capture import Side
from keras_secondorder.diagnostics import (
    Factor,
    cosine,
    effective_rank,
    noise_scale,
    subspace_share,
)
from keras_secondorder.diagnostics.layers import factor_eigenvalues


def test_effective_rank():
    assert effective_rank(np.full(7, 0.3)) == pytest.approx(7)
    assert effective_rank([5.0, 0.0, -1e-9]) == pytest.approx(1)
    p = np.array([0.5, 0.25, 0.25])
    assert effective_rank(8 * p) == pytest.approx(2**1.5)
    assert effective_rank(np.zeros(3)) == 0.0


def test_cosine_and_share_of_a_subspace():
    rng = np.random.default_rng(0)
    Q = np.linalg.qr(rng.normal(size=(6, 3)))[0].T
    v = rng.normal(size=6)
    projection = Q.T @ Q
    assert subspace_share(v, Q) == pytest.approx((v @ projection @ v) / (v @ v))
    assert subspace_share(2.0 * Q[1], Q) == pytest.approx(1.0)
    assert subspace_share(np.zeros(6), Q) == 0.0
    angle = np.arccos(cosine([1.0, 0.0], [1.0, 1.0]))
    assert angle == pytest.approx(np.pi / 4)
    assert cosine(v, -v) == pytest.approx(-1.0)
    assert cosine(v, np.zeros(6)) == 0.0


def test_noise_scale_of_single_examples_is_the_sample_covariance():
    g = np.random.default_rng(1).normal(size=(40, 5)) + 1.0
    found = noise_scale(g, part_size=1)
    variance = np.trace(np.cov(g.T))
    square = g.mean(0) @ g.mean(0) - variance / 40
    assert found.variance == pytest.approx(variance)
    assert found.gradient_square == pytest.approx(square)
    assert found.scale == pytest.approx(variance / square)


def test_noise_scale_is_unbiased_and_does_not_depend_on_the_parts():
    """2,000 draws of 64 examples: their means are within five standard errors."""
    rng = np.random.default_rng(2)
    mean, deviation = np.array([1.0, -0.5]), np.array([0.5, 2.0])
    draws = mean + deviation * rng.normal(size=(2000, 64, 2))
    for parts in (2, 8, 64):
        size = 64 // parts
        means = draws.reshape(2000, parts, size, 2).mean(axis=2)
        found = [noise_scale(m, size) for m in means]
        for values, exact in (
            ([f.variance for f in found], deviation @ deviation),
            ([f.gradient_square for f in found], mean @ mean),
        ):
            error = abs(np.mean(values) - exact)
            assert error <= 5 * np.std(values) / np.sqrt(2000), parts


def test_noise_without_a_signal_has_no_scale():
    g = np.array([[1.0, 0.0], [-1.0, 0.0]])
    assert noise_scale(g, 4).scale is None


def _dense(matrix, side):
    """The matrix that a stored factor stands for, padding cut off."""
    w, dense = side.width, np.zeros((side.stack * side.size,) * 2)
    for i, block in enumerate(matrix.reshape(-1, w, w)):
        group, j = divmod(i, side.blocks)
        start = group * side.size + j * w
        rows = min(w, side.size - j * w)
        dense[start : start + rows, start : start + rows] = block[:rows, :rows]
    return dense


@pytest.mark.parametrize(
    "side", [Side(1, 5), Side(1, 5, 2), Side(1, 5, 5), Side(3, 4), Side(2, 5, 2)]
)
def test_eigenvalues_of_every_form_of_a_factor(side):
    """Padding in the last block is no eigenvalue."""
    rng = np.random.default_rng(3)
    rows = rng.normal(size=(side.stack * side.blocks, side.width, 9))
    if side.blocks > 1 and side.width > 1:
        rows[side.blocks - 1 :: side.blocks, side.size % side.width :] = 0.0
    matrix = (rows @ rows.transpose(0, 2, 1)).reshape(side.shape)
    expected = np.linalg.eigvalsh(_dense(matrix, side))
    np.testing.assert_allclose(
        np.sort(factor_eigenvalues(matrix, side)), np.sort(expected), atol=1e-10
    )


def test_numbers_of_a_factor():
    e, damping = np.array([0.0, 1.0, 3.0]), np.full(3, 0.5)
    factor = Factor("A", e, damping, np.diag(e), None)
    assert factor.scalars() == pytest.approx(
        {
            "condition": 3.5 / 0.5,
            "trace": 4.0,
            "effective_rank": effective_rank(e),
            "largest": 3.0,
            "smallest": 0.0,
            "damping_share": 1.5 / 5.5,
        }
    )
    # Where the product of the factors is damped, no factor is.
    left = {*factor.scalars()} - {*factor._replace(damping=None).scalars()}
    assert left == {"condition", "damping_share"}
    # Neither a zero matrix nor rounding below zero gives anything that is not finite.
    for e in (np.zeros(2), np.array([-1e-9, 1.0])):
        factor = Factor("A", e, np.zeros(2), np.diag(e), None)
        assert np.isfinite(list(factor.scalars().values())).all()
