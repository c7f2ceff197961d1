"""What whitened layers share: their variables, and how they are whitened anew."""

import math

import keras
import numpy as np
from keras import ops

from keras_secondorder.arguments import check_range


class WhitenedLayer:
    """Base class, before the Keras layer with a kernel whose rows see the inputs.

    A subclass implements `call` and `input_rows`.
    """

    def build(self, input_shape):
        """Create the whitening matrix and the mean beside kernel and bias."""
        super().build(input_shape)
        size = math.prod(self.kernel.shape[:-1])
        self.whitening = self.add_weight(
            shape=(size, size),
            initializer=keras.initializers.Identity(),
            trainable=False,
            name="whitening",
        )
        self.mean = self.add_weight(
            shape=(size,), initializer="zeros", trainable=False, name="mean"
        )

    def input_rows(self, inputs):
        """What the rows of the kernel see, shape `(rows, d_in)`."""
        raise NotImplementedError

    def save_own_variables(self, store):
        """All four variables; the plain layer would save two."""
        for variable in self.variables:
            store[variable.name] = variable.numpy()

    def load_own_variables(self, store):
        """The inverse of `save_own_variables`."""
        for variable in self.variables:
            variable.assign(store[variable.name])

    def effective(self) -> tuple:
        """`(K, b)` of the plain layer that this one computes, NumPy arrays."""
        V = _double(self.kernel)
        K = _double(self.whitening) @ V.reshape(-1, V.shape[-1])
        b = _double(self.bias) if self.use_bias else np.zeros(V.shape[-1])
        return K.reshape(V.shape), b - _double(self.mean) @ K

    def set_whitening(self, mean, covariance, epsilon: float) -> None:
        """Whiten by other statistics and leave the function of the layer as it is.

        Args:
            mean: The mean input, shape `(d_in,)`.
            covariance: Its covariance, shape `(d_in, d_in)`.
            epsilon: What is added to the eigenvalues of the covariance, relative to
                their mean.

        Raises:
            ValueError: The layer has no bias, so that no other mean is possible, or
                LoRA is enabled; `epsilon` is not positive, or the statistics are not
                finite.
        """
        if not self.use_bias:
            raise ValueError(
                f"The mean moves into the bias. The layer '{self.name}' has none. "
                "Build it with use_bias=True."
            )
        if self.lora_enabled:
            raise ValueError(
                "Whitening changes the kernel. Received the layer "
                f"'{self.name}' with LoRA enabled, whose kernel is not to change. "
                "Whiten before `enable_lora`."
            )
        check_range("epsilon", epsilon, 0)
        if not np.isfinite(covariance).all():
            raise ValueError(
                "The inputs must be finite, and there must be some. Received others "
                f"for the layer '{self.name}'."
            )
        K, b = self.effective()
        rows = K.reshape(-1, K.shape[-1])
        values, basis = np.linalg.eigh(covariance)
        values = np.maximum(values, 0.0) + epsilon * max(values.mean(), 1e-12)
        root = np.sqrt(values)
        # Rounded as it will be stored, so that V makes up for it.
        whitening = ((basis / root) @ basis.T).astype(self.whitening.dtype)
        self.whitening.assign(whitening)
        self.mean.assign(mean)
        V = np.linalg.solve(whitening.astype("float64"), rows)
        self.kernel.assign(V.reshape(K.shape))
        self.bias.assign(b + _double(self.mean) @ rows)


def _double(variable):
    return ops.convert_to_numpy(variable).astype("float64")
