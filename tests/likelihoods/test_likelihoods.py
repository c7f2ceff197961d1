"""The verbs of every likelihood against NumPy and against Keras's own losses."""

from typing import Any, NamedTuple

import keras
import numpy as np
import oracle
import pytest
from keras import ops

from keras_secondorder import autodiff
from keras_secondorder.likelihoods import (
    Bernoulli,
    Categorical,
    CounterSeed,
    Gaussian,
    Poisson,
)

# A few float32 operations on numbers of order 1.
RTOL = 1e-5
N, D = 5, 3
RNG = np.random.default_rng(0)


class Case(NamedTuple):
    likelihood: Any
    kind: str  # the oracle's name
    loss: Any  # Keras's function
    link: str  # what makes the outputs out of natural parameters
    y: np.ndarray


ONE_HOT = np.eye(D)[RNG.integers(0, D, N)]
BITS = RNG.integers(0, 2, (N, D)).astype(float)


def cases():
    ce, bce = keras.losses.categorical_crossentropy, keras.losses.binary_crossentropy

    def logits(loss):
        return lambda y, z: loss(y, z, from_logits=True)

    mse, poisson = keras.losses.mean_squared_error, keras.losses.poisson
    normal, counts = RNG.normal(size=(N, D)), RNG.poisson(2.0, (N, D)).astype(float)
    return {
        "gaussian": Case(Gaussian(), "mse", mse, "linear", normal),
        "bernoulli, logits": Case(
            Bernoulli(True), "bce_logits", logits(bce), "linear", BITS
        ),
        "bernoulli": Case(Bernoulli(False), "bce", bce, "sigmoid", BITS),
        "categorical, logits": Case(
            Categorical(True), "ce_logits", logits(ce), "linear", ONE_HOT
        ),
        "categorical": Case(Categorical(False), "ce", ce, "softmax", ONE_HOT),
        "poisson": Case(Poisson(), "poisson", poisson, "exponential", counts),
    }


CASES = cases()
NATURAL = RNG.normal(size=(N, D))


@pytest.fixture(params=list(CASES))
def case(request):
    return CASES[request.param]


def tensor(array):
    return ops.convert_to_tensor(np.asarray(array, "float32"))


def outputs(case):
    return oracle.activate(case.link, NATURAL)


def matrices(function, z):
    """The matrix that a verb applies at every position, (N, D, D)."""
    columns = []
    for k in range(z.shape[-1]):
        v = np.zeros(z.shape)
        v[..., k] = 1.0
        columns.append(ops.convert_to_numpy(function(tensor(z), tensor(v))))
    return np.stack(columns, axis=-1)


def close(ours, right, rtol=RTOL):
    np.testing.assert_allclose(ours, right, rtol=0, atol=rtol * np.abs(right).max())


def test_fisher_matrix(case):
    z = outputs(case)
    ours = matrices(case.likelihood.hessian_product, z) * case.likelihood.scale(z)
    close(ours, oracle.output_fisher(case.kind, z))


def test_square_root_times_its_transpose_is_the_fisher_matrix(case):
    z = outputs(case)
    S = matrices(case.likelihood.sqrt_product, z)
    ours = S @ S.swapaxes(-1, -2) * case.likelihood.scale(z)
    close(ours, oracle.output_fisher(case.kind, z))


def test_fisher_is_the_hessian_of_keras_loss_in_natural_parameters(case):
    """`J^T F J * scale`, for the link's Jacobian J, is Keras's own second derivative.

    Behind its canonical link each of these losses has a Hessian without the labels.
    """
    link = {
        "linear": lambda s: s,
        "sigmoid": ops.sigmoid,
        "softmax": ops.softmax,
        "exponential": ops.exp,
    }[case.link]
    y, s = tensor(case.y), tensor(NATURAL)

    def total(primals):
        return ops.sum(case.loss(y, link(primals[0])))

    hessian = matrices(lambda s, v: autodiff.hessian_product(total, [s], [v])[0], s)
    z = outputs(case)
    F = matrices(case.likelihood.hessian_product, z) * case.likelihood.scale(z)
    J = oracle.activation_jacobian(case.link, NATURAL)
    close(J.swapaxes(-1, -2) @ F @ J, hessian)


def test_score_is_the_gradient_of_keras_loss(case):
    z = outputs(case)

    def total(primals, tap):
        return [ops.sum(case.loss(tensor(case.y), primals[0]))], ()

    linear = autodiff.vjp(total, [tensor(z)], taps=False)
    right = ops.convert_to_numpy(linear.pullback([ops.ones(())])[0])
    score = case.likelihood.score(tensor(z), tensor(case.y))
    ours = ops.convert_to_numpy(score) * case.likelihood.scale(z)
    close(ours, right)


# --- sampling ----------------------------------------------------------------------

DRAWS = 20_000
# The deviation of a mean over DRAWS is its standard error; 5 of them, on some 50
# entries, are exceeded by chance once in 30,000 runs, and the seed is fixed.
STANDARD_ERRORS = 5.0


def draws(case, seed=0):
    """Sampled square-root vectors at N outputs, (DRAWS, N, D)."""
    z = tensor(np.broadcast_to(outputs(case), (DRAWS, N, D)))
    random = CounterSeed(seed, ops.convert_to_tensor(3, dtype="int32"))
    return ops.convert_to_numpy(case.likelihood.sampled_sqrt(z, random)).astype(float)


def within_standard_errors(samples, right):
    error = samples.std(0) / np.sqrt(len(samples))
    assert np.all(np.abs(samples.mean(0) - right) <= STANDARD_ERRORS * error + 1e-6)


def test_sampled_vectors_have_the_fisher_matrix_as_second_moment(case):
    s, z = draws(case), outputs(case)
    right = oracle.output_fisher(case.kind, z) / case.likelihood.scale(z)
    within_standard_errors(s[..., :, None] * s[..., None, :], right)


def test_sampled_vectors_have_mean_zero(case):
    """In the directions that the link can move in: for probabilities, sum zero."""
    s = draws(case)
    J = oracle.activation_jacobian(case.link, NATURAL)
    within_standard_errors(np.einsum("tnk,nkj->tnj", s, J), 0.0)


def test_samples_repeat_with_the_counter_and_change_with_it():
    z = tensor(np.zeros((50, D)))

    def draw(seed, counter, stream=0):
        counter = ops.convert_to_tensor(counter, dtype="int32")
        random = CounterSeed(seed, counter, stream)
        return [
            ops.convert_to_numpy(Gaussian().sampled_sqrt(z, random)) for _ in range(2)
        ]

    first, second = draw(0, 7)
    np.testing.assert_array_equal(first, draw(0, 7)[0])
    others = [second, draw(0, 8)[0], draw(1, 7)[0], draw(0, 7, stream=1)[0]]
    for other in others:
        # 150 independent standard normals: correlations beyond 0.4 are 5 deviations.
        assert abs(np.corrcoef(first.ravel(), other.ravel())[0, 1]) < 0.4


def test_one_draw_for_all_steps_is_not_what_the_counter_gives():
    """Neighbouring steps are independent: the mean over 400 steps shrinks by 20."""
    z = tensor(np.zeros((1, D)))
    steps = [
        ops.convert_to_numpy(
            Gaussian().sampled_sqrt(
                z, CounterSeed(0, ops.convert_to_tensor(k, dtype="int32"))
            )
        )
        for k in range(400)
    ]
    within_standard_errors(np.stack(steps), 0.0)


# --- saturated outputs (R8) --------------------------------------------------------

SATURATED = np.array([[100.0, -100.0, 0.0], [-100.0, -100.0, 100.0], [100, 100, -100]])


def through_link(logits_case, link):
    """`J^T F J` and `J^T S`, `J^T s` of a likelihood behind a link, on tensors."""
    likelihood = logits_case.likelihood

    def f(primals, tap):
        return [link(primals[0])], ()

    linear = autodiff.vjp(f, [tensor(SATURATED)], taps=False)
    z = linear.outputs[0]
    roots = []
    for k in range(D):
        u = np.zeros(SATURATED.shape)
        u[:, k] = 1.0
        vector = likelihood.sqrt_product(z, tensor(u))
        roots.append(ops.convert_to_numpy(linear.pullback([vector])[0]))
    random = CounterSeed(0, ops.convert_to_tensor(0, dtype="int32"))
    sample = linear.pullback([likelihood.sampled_sqrt(z, random)])[0]
    product = likelihood.hessian_product(z, ops.ones_like(z))
    S = np.stack(roots, axis=-1)
    return S @ S.swapaxes(-1, -2), ops.convert_to_numpy(sample), product


@pytest.mark.parametrize(
    ("name", "link"), [("bernoulli", ops.sigmoid), ("categorical", ops.softmax)]
)
def test_saturated_outputs_are_finite_and_equal_r8(name, link):
    """R8: logits of +-100, read as logits or as probabilities behind their link."""
    F, sample, product = through_link(CASES[f"{name}, logits"], lambda s: s)
    F_behind, sample_behind, product_behind = through_link(CASES[name], link)
    p = oracle.activate("sigmoid" if name == "bernoulli" else "softmax", SATURATED)
    kind = CASES[f"{name}, logits"].kind
    right = oracle.output_fisher(kind, SATURATED) * (D if name == "bernoulli" else 1)
    for ours in (F, F_behind):
        np.testing.assert_allclose(ours, right, rtol=0, atol=RTOL)
    for values in (sample, sample_behind):
        assert np.isfinite(values).all()
        # Where p is 0 or 1 the sample is certain, so its score vanishes.
        certain = np.minimum(p, 1 - p) < 1e-12
        np.testing.assert_allclose(values[certain], 0.0, atol=RTOL)
    assert np.isfinite(ops.convert_to_numpy(product)).all()
    assert np.isfinite(ops.convert_to_numpy(product_behind)).all()


# --- outputs that are no probabilities ---------------------------------------------


@pytest.mark.parametrize("name", ["bernoulli", "categorical"])
def test_no_curvature_where_keras_clips_a_probability(name):
    """A linear output below 0 or above 1: the loss is flat there, and so is it."""
    z = tensor([[-0.5, 0.3, 1.2], [0.2, -3.0, 3.8], [0.0, 0.25, 0.75]])
    likelihood = CASES[name].likelihood
    F = matrices(likelihood.hessian_product, ops.convert_to_numpy(z))
    clipped = np.array([[1, 0, 1], [0, 1, 1], [1, 0, 0]], bool)
    np.testing.assert_array_equal(np.einsum("nkk->nk", F)[clipped], 0.0)
    assert (np.einsum("nkk->nk", F)[~clipped] > 0).all()
    assert np.abs(F).max() < 10.0
    S = matrices(likelihood.sqrt_product, ops.convert_to_numpy(z))
    if name == "bernoulli":
        close(S @ S.swapaxes(-1, -2), F)


def test_a_rate_below_zero_has_no_curvature():
    z = tensor([[-1.0, 0.0, 2.0]])
    F = matrices(Poisson().hessian_product, ops.convert_to_numpy(z))[0]
    np.testing.assert_allclose(F, np.diag([0.0, 0.0, 0.5]), rtol=1e-6)


def test_outputs_that_do_not_sum_to_one_are_scaled_as_keras_does():
    """The expected Hessian of Keras's own loss, at positive outputs of any size."""
    z = np.exp(2.0 * NATURAL)
    p = z / z.sum(-1, keepdims=True)
    expected = 0.0
    for k in range(D):
        y = np.broadcast_to(np.eye(D)[k], z.shape)

        def total(primals, y=y):
            return ops.sum(CASES["categorical"].loss(tensor(y), primals[0]))

        H = matrices(lambda s, v: autodiff.hessian_product(total, [s], [v])[0], z)
        expected = expected + p[:, k, None, None] * H
    close(matrices(CASES["categorical"].likelihood.hessian_product, z), expected, 1e-4)
