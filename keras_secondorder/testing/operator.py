"""What every `LinearOperator` must do, to be run on any of them."""

import numpy as np
from keras import ops

from keras_secondorder import vectors
from keras_secondorder.curvature import LinearOperator


def check_operator(
    A: LinearOperator,
    psd: bool = False,
    model=None,
    rtol: float = 1e-5,
    seed: int = 0,
) -> None:
    """Check that an operator is one symmetric matrix, whichever way it is asked.

    ```
    A v = M v   with M = A.to_dense() = M^T,   flat, stacked and nested
    (A + 2 A).damped(lam) v = 3 M v + lam v
    A.diagonal() = diag(M),   A.trace(samples=None) = tr(M)
    ```

    The dense matrix is formed, so the operator should be small.

    Args:
        A: The operator.
        psd: Whether it must have no negative eigenvalue.
        model: A model whose weights are moved, to see that the operator stays where it
            is; they are put back. None to leave this out.
        rtol: Largest error allowed, relative to the largest entry of what is compared.
            The default is for sums of some hundred float32 numbers.
        seed: Seed of the vectors.

    Raises:
        AssertionError: A check fails; the message says which, and by how much.

    Example:
        >>> import numpy as np
        >>> from keras_secondorder.curvature import DenseOperator
        >>> check_operator(DenseOperator(np.diag([1.0, 2.0])), psd=True)
        >>> check_operator(DenseOperator(np.diag([1.0, -2.0])), psd=True)
        Traceback (most recent call last):
        AssertionError: negative eigenvalue: off by 2, of at most 2e-05
    """
    size = A.shape[0]
    V = np.random.default_rng(seed).normal(size=(size, 2))
    M = _array(A.to_dense())
    right = M @ V

    def check(what, ours, expected):
        _close(what, _array(ours), expected, rtol)

    _same(f"shape is {A.shape}", A.shape, M.shape)
    _same("rows", sum(int(np.prod(s)) for s in A.shapes), size)
    check("not symmetric", M, M.T)
    check("flat vector", A @ V[:, 0], right[:, 0])
    check("matvec", A.matvec(ops.cast(V[:, 0], A.dtype)), right[:, 0])
    check("stacked columns", A @ V, right)
    check("not linear", A @ (2 * V[:, 0] - 3 * V[:, 1]), right @ [2.0, -3.0])
    first, both = _nested(V[:, 0], A.shapes), _nested(V, A.shapes)
    for what, given, expected in (
        ("nested vector", first, right[:, 0]),
        ("nested columns", both, right),
    ):
        result = A @ given
        _same(f"{what}: shapes", [tuple(r.shape) for r in result], _shapes(given))
        flat = [_array(r).reshape(-1, *expected.shape[1:]) for r in result]
        check(what, np.concatenate(flat), expected)
    combined = (A + 2.0 * A).damped(0.5)
    check("sum, multiple and damping", combined @ V, 3.0 * right + 0.5 * V)
    check("difference", (A - A / 4.0) @ V, 0.75 * right)
    check("negative", -A @ V, -right)
    check("diagonal", A.diagonal(), np.diag(M))
    # Entries of a trace may cancel: what rounds is as large as they are.
    _close("trace", _array(A.trace(samples=None)), np.trace(M), rtol, np.diag(M))
    if psd:
        values = np.linalg.eigvalsh((M + M.T) / 2)
        below = np.minimum(values[:1], 0.0)
        _close("negative eigenvalue", below, np.zeros(1), rtol, values)
    if model is not None:
        _check_unmoved(A, model, V, right, rtol)


def _check_unmoved(A, model, V, right, rtol):
    variables = [*model.trainable_variables, *model.non_trainable_variables]
    floats = [v for v in variables if "float" in v.dtype]
    before = [ops.copy(v) for v in vectors.values(floats)]
    try:
        vectors.assign(floats, [2.0 * value + 0.5 for value in before])
        _close("changes with the model", _array(A @ V), right, rtol)
    finally:
        vectors.assign(floats, before)


def _array(tensor) -> np.ndarray:
    return ops.convert_to_numpy(tensor).astype(float)


def _shapes(given) -> list:
    return [tuple(part.shape) for part in given]


def _nested(V, shapes) -> list:
    """Rows of a vector, or of columns, cut into the shapes of the operator."""
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
    parts = np.split(V, ends[:-1])
    return [p.reshape(*s, *V.shape[1:]) for p, s in zip(parts, shapes, strict=True)]


def _same(what, ours, expected):
    if ours != expected:
        raise AssertionError(f"{what}: {ours}, and not {expected}")


def _close(what, ours, expected, rtol, scale=None):
    """Fail unless the largest error is small beside the largest entry."""
    _same(f"{what}: shape", ours.shape, np.shape(expected))
    bound = rtol * np.abs(expected if scale is None else scale).max()
    error = np.abs(ours - expected).max()
    if not error <= bound:  # NaN is no agreement
        raise AssertionError(f"{what}: off by {error:.3g}, of at most {bound:.3g}")
