"""Approximations of the curvature matrix that can be inverted."""

from keras_secondorder.curvature.block_diagonal import BlockDiagonal, Inverses
from keras_secondorder.curvature.diagonal import DiagonalBlock, IdentityBlock
from keras_secondorder.curvature.fisher_model import fisher_model
from keras_secondorder.curvature.kronecker import SHARINGS, KroneckerBlock
from keras_secondorder.curvature.statistics import FISHERS, batch_factors
from keras_secondorder.curvature.unitwise import UnitwiseBlock

__all__ = [
    "FISHERS",
    "SHARINGS",
    "BlockDiagonal",
    "DiagonalBlock",
    "IdentityBlock",
    "Inverses",
    "KroneckerBlock",
    "UnitwiseBlock",
    "batch_factors",
    "fisher_model",
]
