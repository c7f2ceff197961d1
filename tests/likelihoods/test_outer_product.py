"""Losses that couple outputs: found, said, and read by their gradients."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_secondorder import autodiff, curvature
from keras_secondorder.likelihoods import (
    CounterSeed,
    OuterProduct,
    OutputHessian,
    likelihood_of,
)
from keras_secondorder.likelihoods.heads import as_loss
from keras_secondorder.likelihoods.output_hessian import MAX_DENSE_OUTPUTS

N, D = 8, 3
RNG = np.random.default_rng(0)
RTOL = 1e-5


def tensor(array):
    return ops.convert_to_tensor(np.asarray(array, "float32"))


def squared_mean(y, z):
    return ops.square(ops.mean(z - y))


def contrastive(y, z):
    """One value an example, in which all the others appear."""
    near = ops.matmul(z, ops.transpose(z))
    return -ops.sum(ops.log_softmax(near, axis=-1) * ops.eye(ops.shape(z)[0]), axis=-1)


def along_time(y, z):
    return ops.square(ops.sum(z - y, axis=(1, 2)))


def many_outputs(y, z):
    return ops.sum(z - y, axis=-1) ** 2


def same_label(y, z):
    same = ops.cast(ops.equal(y[:, :1], ops.transpose(y[:, :1])), z.dtype)
    return ops.mean(ops.square(ops.matmul(same, z)), axis=-1)


def ranking(y, z):
    above = ops.cast(y[:, :1] > ops.transpose(y[:, :1]) + 1.0, z.dtype)
    gap = z[:, :1] - ops.transpose(z[:, :1])
    return ops.mean(above * ops.softplus(-gap)) + 0.0 * ops.sum(z)


def mean_of_squares(y, z):
    return ops.mean(ops.square(z - y))


COUPLED = {
    "squared mean": (squared_mean, (N, D)),
    "contrastive": (contrastive, (N, D)),
    "Dice": (keras.losses.Dice(), (N, 4, 4, 1)),
    "along time": (along_time, (N, 30, D)),
    "same label": (same_label, (N, D)),
    "ranking": (ranking, (N, D)),
    "65 outputs": (many_outputs, (N, MAX_DENSE_OUTPUTS + 1)),
}


@pytest.mark.parametrize("name", COUPLED)
def test_a_coupled_loss_is_found_and_said_once(name):
    loss, shape = COUPLED[name]
    loss = as_loss(loss, np.zeros(shape), np.zeros(shape))
    y, z = tensor(RNG.uniform(0.1, 0.9, (2, *shape)))
    with pytest.warns(UserWarning, match="couples outputs of several") as seen:
        made = [likelihood_of(loss, y, z) for _ in range(2)]
    assert all(isinstance(m, OuterProduct) for m in made)
    assert len([w for w in seen if issubclass(w.category, UserWarning)]) == 1


@pytest.mark.parametrize("loss", [mean_of_squares, keras.losses.Huber()])
@pytest.mark.parametrize("shape", [(N, D), (N, 5, D)])
def test_a_loss_of_one_number_need_not_be_coupled(loss, shape, recwarn):
    y, z = tensor(RNG.normal(size=(2, *shape)))
    made = likelihood_of(as_loss(loss, y, z), y, z)
    assert isinstance(made, OutputHessian)
    assert not [w for w in recwarn.list if "The loss" in str(w.message)]


def test_integer_targets_are_looked_at_as_classes(recwarn):
    def doubled(y, z):
        return 2.0 * keras.losses.sparse_categorical_crossentropy(y, z, True)

    y = ops.convert_to_tensor(RNG.integers(0, D, N).astype("int32"))
    z = tensor(RNG.normal(size=(N, D)))
    assert isinstance(likelihood_of(as_loss(doubled, y, z), y, z), OutputHessian)
    assert not [w for w in recwarn.list if "The loss" in str(w.message)]


def test_a_loss_that_cannot_be_looked_at_is_read_by_its_gradients():
    def eight_rows(y, z):
        return ops.sum(ops.reshape(z - y, (N, D)) ** 2, axis=-1)

    y, z = tensor(RNG.normal(size=(2, N, D)))
    with pytest.warns(UserWarning, match="could not be looked at on 16 examples"):
        made = likelihood_of(as_loss(eight_rows, y, z), y, z)
    assert isinstance(made, OuterProduct)


def gradient_of(loss, y, z):
    def total(primals, tap):
        return [ops.sum(loss(y, primals[0]))], ()

    linear = autodiff.vjp(total, [z], taps=False)
    return ops.convert_to_numpy(linear.pullback([ops.ones(())])[0])


@pytest.mark.parametrize("name", ["squared mean", "contrastive"])
def test_verbs_are_those_of_the_outer_product(name):
    loss, shape = COUPLED[name]
    y, z = tensor(RNG.normal(size=(2, *shape)))
    g = gradient_of(loss, y, z)
    flat = name == "squared mean"  # one number: all outputs are one position
    if flat:
        g = np.sqrt(N) * g
    v = RNG.normal(size=shape).astype("float32")
    likelihood = OuterProduct(as_loss(loss, y, z), y, shape)
    given = (lambda t: ops.reshape(tensor(t), (-1,))) if flat else tensor
    for ours in (likelihood, likelihood.at(given(z))):
        Hv = ours.hessian_product(given(z), given(v))
        right = g * (g * v).sum(-1, keepdims=True)
        np.testing.assert_allclose(
            np.reshape(ops.convert_to_numpy(Hv), shape),
            right,
            rtol=RTOL,
            atol=RTOL * np.abs(right).max(),
        )
        s = ours.sampled_sqrt(given(z), CounterSeed(0, ops.zeros((), "int32")))
        np.testing.assert_allclose(
            np.reshape(ops.convert_to_numpy(s), shape), g, rtol=RTOL, atol=1e-7
        )
        u = ours.sqrt_product(given(z), given(v))
        right = g * v[:, :1]
        np.testing.assert_allclose(
            np.reshape(ops.convert_to_numpy(u), shape), right, rtol=1e-4, atol=1e-6
        )


@pytest.mark.parametrize("name", ["squared mean", "contrastive"])
@pytest.mark.filterwarnings("ignore:The loss:UserWarning")
def test_gauss_newton_of_a_coupled_loss_is_its_empirical_fisher(name):
    loss, shape = COUPLED[name]
    # Targets away from 0: their mean is the size of the gradient.
    x, y = RNG.normal(size=(N, 4)), 3.0 + RNG.normal(size=shape)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(D)])
    model.compile(loss=loss)
    G = ops.convert_to_numpy(curvature.gauss_newton(model, x, y).to_dense())
    F = ops.convert_to_numpy(curvature.empirical_fisher(model, x, y).to_dense())
    np.testing.assert_allclose(G, F, rtol=1e-4, atol=1e-5 * np.abs(F).max())
    assert np.abs(F).max() > 1e-2
