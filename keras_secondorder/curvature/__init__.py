"""Curvature matrices: to be multiplied by, and approximations to be inverted."""

from keras_secondorder.curvature.block_diagonal import BlockDiagonal, Inverses
from keras_secondorder.curvature.block_tridiagonal import BlockTridiagonal
from keras_secondorder.curvature.dense_operator import DenseOperator
from keras_secondorder.curvature.diagonal import DiagonalBlock, IdentityBlock
from keras_secondorder.curvature.eigenvalue_corrected import (
    EigenvalueCorrected,
    FactoredEigenvalueCorrected,
)
from keras_secondorder.curvature.exact_tikhonov import ExactTikhonov
from keras_secondorder.curvature.fisher_model import fisher_model
from keras_secondorder.curvature.input_covariance import (
    InputCovariance,
    center,
    input_mean,
    uncenter,
)
from keras_secondorder.curvature.kronecker import SHARINGS, KroneckerBlock
from keras_secondorder.curvature.low_rank import LowRank
from keras_secondorder.curvature.network import (
    NetworkOperator,
    empirical_fisher,
    fisher,
    gauss_newton,
    hessian,
)
from keras_secondorder.curvature.operator import LinearOperator
from keras_secondorder.curvature.spectrum import Density, Eigenpairs
from keras_secondorder.curvature.statistics import FISHERS, batch_factors
from keras_secondorder.curvature.unitwise import UnitwiseBlock

#: The forms of the approximate Fisher matrix, by the name that `KFAC` has for them.
APPROXIMATIONS = {
    "block_diagonal": BlockDiagonal,
    "block_tridiagonal": BlockTridiagonal,
    "eigenvalue_corrected": FactoredEigenvalueCorrected,
}
#: The same by how `lambda I` enters: by a part of it in each factor, or as it is.
TIKHONOV = {
    "factored": APPROXIMATIONS,
    "exact": {
        "block_diagonal": ExactTikhonov,
        "eigenvalue_corrected": EigenvalueCorrected,
    },
}

__all__ = [
    "APPROXIMATIONS",
    "FISHERS",
    "SHARINGS",
    "TIKHONOV",
    "BlockDiagonal",
    "BlockTridiagonal",
    "DenseOperator",
    "Density",
    "DiagonalBlock",
    "EigenvalueCorrected",
    "Eigenpairs",
    "ExactTikhonov",
    "IdentityBlock",
    "InputCovariance",
    "Inverses",
    "KroneckerBlock",
    "LinearOperator",
    "LowRank",
    "NetworkOperator",
    "UnitwiseBlock",
    "batch_factors",
    "center",
    "empirical_fisher",
    "fisher",
    "fisher_model",
    "gauss_newton",
    "hessian",
    "input_mean",
    "uncenter",
]
