"""Losses that are no likelihood: their output Hessian, and the ones refused."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_secondorder.likelihoods import (
    CounterSeed,
    Gaussian,
    OutputHessian,
    likelihood_of,
)
from keras_secondorder.likelihoods.heads import as_loss
from keras_secondorder.likelihoods.output_hessian import MAX_DENSE_OUTPUTS

# Second differences in float64 NumPy are good to 1e-6; the rest is float32.
RTOL = 1e-4
N, D = 6, 3
DRAWS = 4000
RNG = np.random.default_rng(0)


def tensor(array):
    return ops.convert_to_tensor(np.asarray(array, "float32"))


def huber(y, z):
    e = np.abs(z - y)
    return np.where(e <= 1.0, 0.5 * e**2, e - 0.5).mean(-1)


def log_cosh(y, z):
    return np.log(np.cosh(z - y)).mean(-1)


def kl_divergence(y, z):
    return (y * np.log(y / z)).sum(-1)


def quartic(y, z):
    """Couples its outputs, so that the blocks are not diagonal."""
    return ((z - y).sum(-1) ** 2) ** 2 + ((z - y) ** 2).sum(-1)


def quartic_keras(y, z):
    return ops.sum(z - y, axis=-1) ** 4 + ops.sum((z - y) ** 2, axis=-1)


def probabilities():
    p = RNG.uniform(0.1, 1.0, (N, D))
    return p / p.sum(-1, keepdims=True)


LOSSES = {
    "huber": (
        lambda: keras.losses.Huber(), huber, RNG.normal(size=(2, N, D)) * 0.9
    ),
    "log-cosh": (
        lambda: keras.losses.LogCosh(), log_cosh, RNG.normal(size=(2, N, D))
    ),
    "KL divergence": (
        lambda: keras.losses.KLDivergence(),
        kl_divergence,
        np.stack([probabilities(), probabilities()]),
    ),
    "a function": (
        lambda: as_compiled(quartic_keras), quartic, RNG.normal(size=(2, N, D))
    ),
}  # fmt: skip


def as_compiled(loss):
    """A loss function as `compile(loss=...)` reads it."""
    return as_loss(loss, np.zeros((N, D)), np.zeros((N, D)))


def differences(loss, y, z, step=1e-4):
    """The Hessian blocks by central differences in float64, (N, D, D)."""
    H = np.zeros((*z.shape, D))
    for i in range(D):
        for j in range(D):
            a, b = step * np.eye(D)[i], step * np.eye(D)[j]
            corners = (
                loss(y, z + a + b) - loss(y, z + a - b)
                - loss(y, z - a + b) + loss(y, z - a - b)
            )  # fmt: skip
            H[:, i, j] = corners / (4 * step**2)
    return H


@pytest.fixture(scope="module", params=list(LOSSES))
def case(request):
    make, loss, (y, z) = LOSSES[request.param]
    if request.param == "huber":  # not at its kinks, where no second derivative is
        assert np.all(np.abs(np.abs(z - y) - 1.0) > 1e-3)
    return likelihood_of(make(), tensor(y), tensor(z)), differences(loss, y, z), z


def matrices(function, z):
    columns = [
        function(tensor(z), tensor(np.broadcast_to(np.eye(D)[k], z.shape)))
        for k in range(D)
    ]
    return np.stack([ops.convert_to_numpy(c) for c in columns], axis=-1)


def test_hessian_product(case):
    likelihood, H, z = case
    assert isinstance(likelihood, OutputHessian)
    ours = matrices(likelihood.hessian_product, z) * likelihood.scale(z)
    np.testing.assert_allclose(ours, H, rtol=0, atol=RTOL * np.abs(H).max())


def test_square_root(case):
    likelihood, H, z = case
    S = matrices(likelihood.sqrt_product, z)
    ours = S @ S.swapaxes(-1, -2)
    np.testing.assert_allclose(ours, H, rtol=0, atol=RTOL * np.abs(H).max())


def test_random_square_root_has_the_hessian_as_second_moment(case):
    likelihood, H, z = case
    random = CounterSeed(0, ops.convert_to_tensor(0, dtype="int32"))
    many = OutputHessian(_Repeated(likelihood._loss, DRAWS), likelihood._y)
    s = many.sampled_sqrt(tensor(np.broadcast_to(z, (DRAWS, N, D))), random)
    s = ops.convert_to_numpy(s).astype(float)
    moments = s[..., :, None] * s[..., None, :]
    error = moments.std(0) / np.sqrt(DRAWS)
    # Five standard errors, on 54 entries, with a fixed seed.
    assert np.all(np.abs(moments.mean(0) - H) <= 5 * error + 1e-5)


class _Repeated:
    """The loss at the same targets for many copies of the outputs."""

    def __init__(self, loss, copies):
        self._loss, self._copies = loss, copies

    def call(self, y, z):
        return self._loss.call(ops.broadcast_to(y, (self._copies, N, D)), z)


@pytest.mark.parametrize("y_dtype", ["int32", "float32"])
def test_integer_targets_of_rank_one(y_dtype):
    """y (N,) against z (N, 1): Keras aligns them, and converts the targets."""
    y, z = np.array([0, 1, 1, 0]), np.array([[0.3], [0.4], [-0.5], [0.6]])
    likelihood = likelihood_of(
        keras.losses.LogCosh(), ops.convert_to_tensor(y.astype(y_dtype)), tensor(z)
    )
    ours = likelihood.hessian_product(tensor(z), tensor(np.ones((4, 1))))
    right = 1.0 - np.tanh(z - y[:, None]) ** 2
    np.testing.assert_allclose(ops.convert_to_numpy(ours), right, rtol=RTOL)


def test_many_separate_outputs_have_diagonal_blocks():
    width = MAX_DENSE_OUTPUTS + 6
    y, z = RNG.normal(size=(2, 4, width))
    likelihood = likelihood_of(keras.losses.LogCosh(), tensor(y), tensor(z))
    v = RNG.normal(size=(4, width))
    right = v * (1 - np.tanh(z - y) ** 2) / width
    ours = likelihood.hessian_product(tensor(z), tensor(v))
    close = {"rtol": RTOL, "atol": RTOL * np.abs(right).max()}
    np.testing.assert_allclose(ops.convert_to_numpy(ours), right, **close)
    S = ops.convert_to_numpy(likelihood.sqrt_product(tensor(z), tensor(v)))
    np.testing.assert_allclose((S**2).sum(), np.sum(v * right), rtol=RTOL)


@pytest.mark.parametrize(
    "loss",
    [
        lambda: keras.losses.CosineSimilarity(),
        lambda: as_compiled(lambda y, z: -ops.sum((z - y) ** 2, axis=-1)),
        # Convex for errors below 1 only.
        lambda: as_compiled(lambda y, z: ops.sum(ops.log1p((z - y) ** 2), axis=-1)),
        lambda: keras.losses.BinaryFocalCrossentropy(gamma=4.0, from_logits=True),
    ],
    ids=["cosine", "concave", "Cauchy", "focal on logits"],
)
def test_a_loss_that_is_not_convex_is_projected_with_one_warning(loss):
    y, z = tensor(np.zeros((2, D))), tensor(RNG.normal(size=(2, D)))
    loss = loss()
    with pytest.warns(UserWarning, match="is not convex in the outputs") as seen:
        likelihood = likelihood_of(loss, y, z)
        likelihood_of(loss, y, z)
    seen = [w for w in seen if issubclass(w.category, UserWarning)]
    assert len(seen) == 1
    assert "KFAC(fisher='empirical', damping=0.1)" in str(seen[0].message)
    H = matrices(likelihood.hessian_product, z)
    assert np.linalg.eigvalsh((H + H.swapaxes(1, 2)) / 2).min() >= -RTOL


def test_a_loss_without_curvature_is_said_to_have_none():
    y, z = tensor(np.zeros((2, D))), tensor(RNG.normal(size=(2, D)))
    with pytest.warns(UserWarning, match="Gauss-Newton and Fisher matrices are zero"):
        likelihood_of(keras.losses.MeanAbsoluteError(), y, z)


def test_negative_eigenvalues_are_set_to_zero():

    class Saddle:
        def call(self, y, z):
            return z[..., 0] ** 2 - z[..., 1] ** 2 + 0.0 * ops.sum(z, axis=-1)

    z = tensor(RNG.normal(size=(2, D)))
    ours = OutputHessian(Saddle(), z).hessian_product(z, ops.ones_like(z))
    right = np.broadcast_to([2.0, 0.0, 0.0], (2, D))
    np.testing.assert_allclose(ops.convert_to_numpy(ours), right, atol=RTOL)


def test_a_subclass_with_its_own_call_is_another_loss():
    class Doubled(keras.losses.MeanSquaredError):
        def call(self, y_true, y_pred):
            return 2.0 * super().call(y_true, y_pred)

    y, z = tensor(np.zeros((N, D))), tensor(np.ones((N, D)))
    plain = likelihood_of(keras.losses.MeanSquaredError(), y, z)
    assert isinstance(plain, Gaussian)
    doubled = likelihood_of(Doubled(), y, z)
    ours = doubled.hessian_product(z, ops.ones_like(z)) * doubled.scale(z)
    np.testing.assert_allclose(ops.convert_to_numpy(ours), 4.0 / D, rtol=RTOL)
