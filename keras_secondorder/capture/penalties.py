"""The L2 penalties of a model, which are part of its curvature."""

import keras


def l2_curvature(variable) -> float:
    """`eta`: the second derivative of the L2 penalty on a variable, 0 without one."""
    return 2.0 * float(getattr(variable.regularizer, "l2", 0.0) or 0.0)


def has_only_l2(variable) -> bool:
    """Whether the gradient of the penalty on a variable `w` is `eta w`, or zero."""
    penalty = variable.regularizer
    if type(penalty) not in (keras.regularizers.L2, keras.regularizers.L1L2):
        return penalty is None
    return not getattr(penalty, "l1", 0.0)
