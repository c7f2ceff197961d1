"""The check of an optimizer: ours pass it, and what it is there to find fails it."""

import keras
import pytest

import keras_secondorder as kso
from keras_secondorder.testing import check_optimizer
from keras_secondorder.testing.optimizer import (
    _regression,
    _valley,
    check_config,
    check_minimises,
    check_resume,
)

OPTIMIZERS = {
    # Inverses and damping with intervals, in whose middle the run is resumed.
    "kfac": lambda: kso.KFAC.thesis(
        damping=kso.AdaptiveDamping(1.0, every=2, gamma_every=None),
        statistics_every=2,
        inverse_every=5,
    ),
    # Rosenbrock's layer is not affine: plain steps there, which must be small.
    "acp": lambda: kso.ACP(
        0.003, momentum=0.8, damping=0.005, alpha=0.02, refresh_every=4
    ),
    "centered": lambda: kso.CenteredSGD(0.003, momentum=0.8),
    "natural network": lambda: kso.NaturalNetwork(0.003, momentum=0.8, refresh_every=4),
    "eigenvalue corrected": lambda: kso.KFAC.thesis(
        damping=kso.AdaptiveDamping(1.0, every=2, gamma_every=4),
        approximation="eigenvalue_corrected",
        inverse_every=4,
    ),
    "hessian-free": kso.HessianFree,
    "kronecker": lambda: kso.HessianFree(preconditioner="kronecker"),
    "natural gradient": kso.NaturalGradient,
    "krylov subspace": kso.KrylovSubspaceDescent,
}
FIRST_ORDER = ("acp", "centered", "natural network")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ours_keep_it(name):
    steps = 60 if name in FIRST_ORDER else 30
    if name in FIRST_ORDER and keras.config.backend() != "torch":
        check_config(OPTIMIZERS[name])  # a compilation less for each
        check_resume(OPTIMIZERS[name])
    else:
        check_optimizer(OPTIMIZERS[name], steps, steps)


def test_it_serves_keras_optimizers_as_well():
    adam = keras.optimizers.Adam
    check_config(adam)
    check_minimises("quadratic", _regression, lambda: adam(0.3), 60, 0.2)


@keras.saving.register_keras_serializable(package="tests")
class Drops(keras.optimizers.SGD):
    """It forgets its momentum."""

    @classmethod
    def from_config(cls, config, custom_objects=None):
        return cls(config["learning_rate"])


@keras.saving.register_keras_serializable(package="tests")
class Unsaved(keras.optimizers.SGD):
    """It steps by a number that is not a variable."""

    traced = 0

    def apply(self, grads, trainable_variables=None):
        self.traced += 1
        return super().apply([g / self.traced for g in grads], trainable_variables)

    def stateless_apply(self, optimizer_variables, grads, trainable_variables):
        self.traced += 1
        grads = [g / self.traced for g in grads]
        return super().stateless_apply(optimizer_variables, grads, trainable_variables)


def test_a_config_that_changes_is_found():
    with pytest.raises(AssertionError, match="config: .* changed momentum"):
        check_config(lambda: Drops(0.1, momentum=0.5))


@pytest.mark.skipif(
    keras.config.backend() != "torch", reason="compiled steps would not count"
)
def test_state_outside_of_variables_is_found():
    with pytest.raises(AssertionError, match="resume: after going on, .* is another"):
        check_resume(lambda: Unsaved(1e-3))


@pytest.mark.parametrize(
    ("rate", "message"),
    [(1e-7, "which is not below 0.1 of it"), (1e3, "valley: the loss became")],
)
def test_steps_that_do_not_minimise_are_found(rate, message):
    with pytest.raises(AssertionError, match=message):
        check_minimises("valley", _valley, lambda: keras.optimizers.SGD(rate), 10, 0.1)
