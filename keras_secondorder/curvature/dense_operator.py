"""A symmetric matrix that is at hand."""

from typing import Any

import keras
from keras import ops

from keras_secondorder.curvature.operator import LinearOperator

SYMMETRY_TOLERANCE = 1e-4  # relative to the largest entry


class DenseOperator(LinearOperator):
    """A matrix that is at hand.

    Args:
        matrix: Symmetric, shape `(P, P)`; float64 is kept, all else is float32.
        shapes: Shapes of a nested vector; default: one tensor of shape `(P,)`.

    Raises:
        ValueError: The matrix is not square, or not symmetric.
    """

    def __init__(self, matrix: Any, shapes: list | None = None):
        matrix = ops.convert_to_tensor(matrix)
        if len(matrix.shape) != 2 or matrix.shape[0] != matrix.shape[1]:
            raise ValueError(
                f"`matrix` must be square. Received one of shape {tuple(matrix.shape)}."
            )
        if keras.backend.standardize_dtype(matrix.dtype) != "float64":
            matrix = ops.cast(matrix, "float32")
        dtype = keras.backend.standardize_dtype(matrix.dtype)
        skew = float(ops.max(ops.absolute(matrix - ops.transpose(matrix))))
        if skew > SYMMETRY_TOLERANCE * float(ops.max(ops.absolute(matrix))):
            raise ValueError(
                "`matrix` must be symmetric. Received one that differs from its "
                f"transpose by {skew:.3g}. Pass `(matrix + matrix.T) / 2` if that is "
                "rounding."
            )
        super().__init__(shapes or [(matrix.shape[0],)], dtype)
        self._matrix = matrix

    def products(self, columns):
        """Columns of one matrix product."""
        # `@` rather than `ops.matmul`, which turns float64 to float32 on torch.
        result = self._matrix @ ops.stack(columns, axis=1)
        return [result[:, i] for i in range(len(columns))]
