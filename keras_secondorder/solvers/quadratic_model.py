"""The quadratic model of the objective, minimised in the span of a few vectors."""

from typing import NamedTuple

from keras import ops

# Directions whose cosine (in the model's own metric) is closer to 1 than this are one
# direction in float32; the second then adds nothing but rounding.
COLLINEAR = 1e-6


class Minimum(NamedTuple):
    """Coefficients of the minimiser and the model's value there."""

    alpha: object
    mu: object
    value: object


def minimise(Q, b) -> Minimum:
    """Minimise `M(alpha, mu) = 1/2 [alpha mu] Q [alpha mu]^T + b . [alpha mu]`.

    ```
    [alpha, mu] = -Q^-1 b,   M = 1/2 b . [alpha, mu]
    ```

    Where the second direction is zero or parallel to the first, `mu = 0` and `alpha`
    minimises alone.

    Args:
        Q: Shape `(2, 2)`, symmetric positive semi-definite: `v_i^T (F + lambda I) v_j`.
        b: Shape `(2,)`: `v_i . gradient`.

    Returns:
        A `Minimum` of float32 scalars.

    References:
        Martens (2016), thesis, sections 6.6.4 and 6.7.
    """
    tiny = 1e-30
    q11, q12, q22 = Q[0, 0], Q[0, 1], Q[1, 1]
    alone = -b[0] / ops.maximum(q11, tiny)
    # In units where both directions have length 1 the determinant is 1 - cos^2.
    r1, r2 = ops.sqrt(ops.maximum(q11, tiny)), ops.sqrt(ops.maximum(q22, tiny))
    cosine = (q12 / r1) / r2
    determinant = 1.0 - cosine**2
    b1, b2 = b[0] / r1, b[1] / r2
    both = ops.logical_and(determinant > COLLINEAR, q22 > tiny)
    safe = ops.where(both, determinant, 1.0)
    alpha = ops.where(both, -(b1 - cosine * b2) / safe / r1, alone)
    mu = ops.where(both, -(b2 - cosine * b1) / safe / r2, 0.0)
    return Minimum(alpha, mu, 0.5 * (b[0] * alpha + b[1] * mu))
