"""Keras losses read as output distributions; the only place that knows reductions."""

from keras_secondorder.likelihoods.base import CounterSeed, Likelihood
from keras_secondorder.likelihoods.bernoulli import Bernoulli
from keras_secondorder.likelihoods.categorical import Categorical
from keras_secondorder.likelihoods.gaussian import Gaussian
from keras_secondorder.likelihoods.heads import (
    LOSS_WEIGHTS,
    Head,
    check_likelihood,
    couples,
    likelihood_of,
    loss_weights_of,
    read_heads,
)
from keras_secondorder.likelihoods.outer_product import OuterProduct
from keras_secondorder.likelihoods.output_hessian import OutputHessian, loss_values
from keras_secondorder.likelihoods.outputs import (
    Curve,
    curvature_cotangents,
    effective_examples,
    example_weights,
    fisher_gram,
    gradient_weights,
    sqrt_cotangents,
)
from keras_secondorder.likelihoods.poisson import Poisson
from keras_secondorder.likelihoods.position_weights import (
    by_position,
    position_weights,
    with_shares,
)

__all__ = [
    "LOSS_WEIGHTS",
    "Bernoulli",
    "Categorical",
    "CounterSeed",
    "Curve",
    "Gaussian",
    "Head",
    "Likelihood",
    "OuterProduct",
    "OutputHessian",
    "Poisson",
    "by_position",
    "check_likelihood",
    "couples",
    "curvature_cotangents",
    "effective_examples",
    "example_weights",
    "fisher_gram",
    "gradient_weights",
    "likelihood_of",
    "loss_values",
    "loss_weights_of",
    "position_weights",
    "read_heads",
    "sqrt_cotangents",
    "with_shares",
]
