"""The inverse of a difference of two Kronecker products, `A (x) B - C (x) D`."""

from keras import ops

from keras_secondorder.autodiff import symmetric_eigh
from keras_secondorder.curvature.factor import raised, scaled_damped
from keras_secondorder.curvature.low_rank import traces


def joint_roots(factors: list, dampings: list, others: list, compiled=False) -> list:
    """`(K, s)` with `K^T (A + damping I) K = I` and `K^T C K = diag(s)`.

    ```
    A + damping I = Q diag(a) Q^T,   R = Q diag(a)^(-1/2)
    R^T C R = E diag(s) E^T,         K = R E
    ```

    Args:
        factors: Symmetric positive semi-definite matrices `A`.
        dampings: A positive scalar for each.
        others: Symmetric matrices `C` with `0 <= C <= A`, one for each.
        compiled: Whether the step runs inside XLA.

    Returns:
        A pair for each matrix, NaN throughout where there is none. Rounding cannot
        take `a` or `s` out of their bounds: `a` is no less than the damping, and `s`
        lies in `[0, t / (t + damping)]` with `t` the trace of `A`, below 1.
    """
    scaled, scales, least = [], [], []
    for A, damping in zip(factors, dampings, strict=True):
        matrix, scale = scaled_damped(A, damping)
        scaled.append(matrix)
        scales.append(scale)
        least.append(raised(damping, traces(A)) / scale[0, 0])
    roots, reduced = [], []
    for (a, Q), C, scale, low in zip(
        symmetric_eigh(scaled, compiled), others, scales, least, strict=True
    ):
        R = Q / ops.sqrt(ops.maximum(a, low))
        M = ops.matmul(ops.transpose(R), ops.matmul(C / scale, R))
        roots.append(R)
        reduced.append(0.5 * (M + ops.transpose(M)))
    results = []
    for (s, E), R, scale, low in zip(
        symmetric_eigh(reduced, compiled), roots, scales, least, strict=True
    ):
        size = R.shape[0]
        most = (size - size * low) / (size - size * low + low)  # t / (t + damping)
        results.append((ops.matmul(R, E) / ops.sqrt(scale), ops.clip(s, 0.0, most)))
    return results


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
        Martens (2016), thesis, appendix B.2; Martens & Grosse (2015), appendix B. The
        root `Q a^(-1/2)` takes the place of the symmetric `Q a^(-1/2) Q^T`: the product
        is the same.
    """
    (K_A, s_A), (K_B, s_B) = left, right
    inner = ops.matmul(ops.matmul(ops.transpose(K_A), V), K_B)
    inner = inner / (1.0 - s_A[:, None] * s_B[None])
    return ops.matmul(ops.matmul(K_A, inner), ops.transpose(K_B))
