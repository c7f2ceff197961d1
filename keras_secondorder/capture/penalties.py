"""The L2 penalties of a model, which are part of its curvature."""


def l2_curvature(variable) -> float:
    """`eta`: the second derivative of the L2 penalty on a variable, 0 without one."""
    return 2.0 * float(getattr(variable.regularizer, "l2", 0.0) or 0.0)
