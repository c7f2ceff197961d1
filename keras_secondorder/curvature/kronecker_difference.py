"""The inverse of a difference of two Kronecker products, `A (x) B - C (x) D`."""

from keras import ops

from keras_secondorder import autodiff
from keras_secondorder.curvature.factor import raised, scaled_damped


def joint_roots(factors: list, dampings: list, others: list, compiled=False) -> list:
    """`(K, s)` with `K^T (A + damping I) K = I` and `K^T C K = diag(s)`.

    Args:
        factors: Symmetric positive semi-definite matrices `A`.
        dampings: A positive scalar for each.
        others: Symmetric matrices `C` with `0 <= C <= A`, one for each.
        compiled: Whether the step runs inside XLA.

    Returns:
        A pair for each matrix, NaN throughout where a factorisation failed. `s` is
        kept where exact arithmetic would have it, in `[0, t / (t + damping)]` with `t`
        the trace of `A`: below 1, whatever rounding does.
    """
    pairs, scales, most = [], [], []
    for A, damping, C in zip(factors, dampings, others, strict=True):
        matrix, scale = scaled_damped(A, damping)
        pairs.append((matrix, 0.5 * (C + ops.transpose(C)) / scale))
        scales.append(scale)
        trace = ops.trace(A)
        most.append(trace / (trace + raised(damping, trace)))
    return [
        (K / ops.sqrt(scale), ops.clip(s, 0.0, top))
        for (s, K), scale, top in zip(
            autodiff.spd_pencils(pairs, compiled), scales, most, strict=True
        )
    ]


def solve_difference(V, left: tuple, right: tuple):
    """`X` with `A X B - C X D = V`.

    ```
    X = K_A ((K_A^T V K_B) / (1 - s_A s_B^T)) K_B^T
    ```

    With row-major `vec`, this is `(A (x) B - C (x) D)^-1 vec(V)`.

    Args:
        V: A matrix.
        left: `(K, s)` of the pair `(A, C)`, from `joint_roots`.
        right: `(K, s)` of the pair `(B, D)`.

    References:
        Martens (2016), thesis, appendix B.2, with `A^(-1/2) E_1` for `K_A`. Any root
        of `A` gives the same product; this one comes from a Cholesky factorisation,
        which is cheaper than the symmetric root of the source.
    """
    (K_A, s_A), (K_B, s_B) = left, right
    inner = ops.matmul(ops.matmul(ops.transpose(K_A), V), K_B)
    inner = inner / (1.0 - s_A[:, None] * s_B[None])
    return ops.matmul(ops.matmul(K_A, inner), ops.transpose(K_B))
