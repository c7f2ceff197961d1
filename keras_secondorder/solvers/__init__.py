"""Solvers that know nothing of networks: vectors, products and scalars only."""

from keras_secondorder.solvers.backtracking import Choice, backtrack
from keras_secondorder.solvers.bfgs import bfgs
from keras_secondorder.solvers.conjugate_gradient import conjugate_gradient
from keras_secondorder.solvers.lanczos import (
    RitzPairs,
    Tridiagonal,
    lanczos,
    ritz_pairs,
)
from keras_secondorder.solvers.line_search import LineSearch, backtracking_line_search
from keras_secondorder.solvers.minres_qlp import minres_qlp
from keras_secondorder.solvers.result import (
    Estimates,
    Iterates,
    Solution,
    Status,
    describe,
)

__all__ = [
    "Choice",
    "Estimates",
    "Iterates",
    "LineSearch",
    "RitzPairs",
    "Solution",
    "Status",
    "Tridiagonal",
    "backtrack",
    "backtracking_line_search",
    "bfgs",
    "conjugate_gradient",
    "describe",
    "lanczos",
    "minres_qlp",
    "ritz_pairs",
]
