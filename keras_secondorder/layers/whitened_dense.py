"""Dense layers that see their inputs whitened."""

import keras
from keras import ops

from keras_secondorder.layers.whitened import WhitenedLayer


@keras.saving.register_keras_serializable(package="keras_secondorder")
class WhitenedDense(WhitenedLayer, keras.layers.Dense):
    """A dense layer with trained weights for whitened inputs.

    ```
    s = U (h - mean) V + d,   U = (C + epsilon I)^(-1/2)
    ```

    `mean` and `C`, the mean and the covariance of the input `h`, are not trained:
    `rewhiten` estimates them and changes `V` and `d` so that the function of the layer
    stays what it was. They start as 0 and the identity, as a plain dense layer.
    Gradient descent on `V` and `d` is then natural gradient descent with the Fisher
    matrix `C (x) I` of the last estimate.

    Args:
        units: Number of outputs.
        **kwargs: Those of `keras.layers.Dense`.

    References:
        Desjardins, Simonyan, Pascanu & Kavukcuoglu (2015), section 3; George (2017),
        thesis, section 6.5.2. A whitened input is a row vector here, as everywhere in
        Keras, and `V` is the layer's `kernel`.
    """

    def call(self, inputs, training=None):
        """The dense layer on whitened inputs."""
        centred = inputs - ops.cast(ops.convert_to_tensor(self.mean), inputs.dtype)
        whitening = ops.cast(ops.convert_to_tensor(self.whitening), inputs.dtype)
        return super().call(ops.matmul(centred, whitening), training=training)

    def input_rows(self, inputs):
        """Every position is a row."""
        return ops.reshape(inputs, (-1, inputs.shape[-1]))
