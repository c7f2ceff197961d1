"""Approximations of the curvature matrix that can be inverted."""

from collections.abc import Callable

from keras_secondorder.capture import Block
from keras_secondorder.curvature.diagonal import DiagonalBlock, IdentityBlock
from keras_secondorder.curvature.kronecker import KroneckerBlock, running_average


def make_block(plan: Block, add_variable: Callable, compiled: bool = False):
    """The block that a plan asks for, with its variables.

    Args:
        plan: One entry of `capture.plan_blocks`.
        add_variable: The optimizer's `add_variable`.
        compiled: Whether the step runs inside XLA.
    """
    if plan.kind == "kronecker":
        return KroneckerBlock(plan, add_variable, compiled)
    if plan.kind == "diagonal":
        return DiagonalBlock(plan, add_variable)
    return IdentityBlock(plan)


__all__ = [
    "DiagonalBlock",
    "IdentityBlock",
    "KroneckerBlock",
    "make_block",
    "running_average",
]
