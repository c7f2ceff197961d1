"""Dense layers that see their inputs whitened, and models made of them."""

import contextlib

import keras
import numpy as np
from keras import ops

from keras_secondorder.capture import replaced, sublayers


@keras.saving.register_keras_serializable(package="keras_secondorder")
class WhitenedDense(keras.layers.Dense):
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

    def build(self, input_shape):
        """Create the whitening matrix and the mean beside kernel and bias."""
        super().build(input_shape)
        size = input_shape[-1]
        self.whitening = self.add_weight(
            shape=(size, size),
            initializer=keras.initializers.Identity(),
            trainable=False,
            name="whitening",
        )
        self.mean = self.add_weight(
            shape=(size,), initializer="zeros", trainable=False, name="mean"
        )

    def call(self, inputs, training=None):
        """The dense layer on whitened inputs."""
        centred = inputs - ops.cast(ops.convert_to_tensor(self.mean), inputs.dtype)
        whitening = ops.cast(ops.convert_to_tensor(self.whitening), inputs.dtype)
        return super().call(ops.matmul(centred, whitening), training=training)

    def save_own_variables(self, store):
        """All four variables; a plain dense layer would save two."""
        for variable in self.variables:
            store[variable.name] = variable.numpy()

    def load_own_variables(self, store):
        """The inverse of `save_own_variables`."""
        for variable in self.variables:
            variable.assign(store[variable.name])

    def effective(self) -> tuple:
        """`(K, b)` of the plain dense layer that this one computes, NumPy arrays."""
        K = _double(self.whitening) @ _double(self.kernel)
        b = _double(self.bias) if self.use_bias else np.zeros(self.units)
        return K, b - _double(self.mean) @ K

    def set_whitening(self, mean, covariance, epsilon: float) -> None:
        """Whiten by other statistics and leave the function of the layer as it is.

        Args:
            mean: The mean input, shape `(d_in,)`.
            covariance: Its covariance, shape `(d_in, d_in)`.
            epsilon: What is added to the eigenvalues of the covariance, relative to
                their mean.

        Raises:
            ValueError: The layer has no bias, so that no other mean is possible;
                `epsilon` is not positive, or the statistics are not finite.
        """
        if not self.use_bias:
            raise ValueError(
                f"The mean moves into the bias. The layer '{self.name}' has none. "
                "Build it with use_bias=True."
            )
        if not epsilon > 0 or not np.isfinite(covariance).all():
            raise ValueError(
                "`epsilon` must be above 0 and the inputs finite, and there must be "
                f"some. Received epsilon={epsilon} for the layer '{self.name}'."
            )
        K, b = self.effective()
        values, basis = np.linalg.eigh(covariance)
        values = np.maximum(values, 0.0) + epsilon * max(values.mean(), 1e-12)
        root = np.sqrt(values)
        # Rounded as it will be stored, so that V makes up for it.
        whitening = ((basis / root) @ basis.T).astype(self.whitening.dtype)
        self.whitening.assign(whitening)
        self.mean.assign(mean)
        self.kernel.assign(np.linalg.solve(whitening.astype("float64"), K))
        self.bias.assign(b + _double(self.mean) @ K)


def whiten(model: keras.Model) -> keras.Model:
    """A model of the same function with `WhitenedDense` in place of its `Dense` layers.

    Layers without a bias, and subclasses of `Dense`, stay as they are.

    Args:
        model: A built Sequential or functional model; its weights are copied.

    Returns:
        A new model, not compiled. Call `rewhiten(model, x)` before training it, and
        every now and then.

    Raises:
        ValueError: It is neither, or not built.
    """
    if not isinstance(model, keras.Sequential | keras.Model) or not model.built:
        raise ValueError(
            "`whiten` takes a built Sequential or functional model. "
            f"Received {model!r}. Build it first."
        )

    def convert(layer):
        if type(layer) is keras.layers.Dense and layer.use_bias:
            return WhitenedDense.from_config(layer.get_config())
        return layer.__class__.from_config(layer.get_config())

    new = keras.models.clone_model(model, clone_function=convert)
    for old, layer in zip(model.layers, new.layers, strict=True):
        if isinstance(layer, WhitenedDense) and not isinstance(old, WhitenedDense):
            layer.kernel.assign(old.kernel)
            layer.bias.assign(old.bias)
        else:
            layer.set_weights(old.get_weights())
    return new


def rewhiten(model: keras.Model, x, epsilon: float = 0.1) -> None:
    """Whiten all `WhitenedDense` layers by what they see of some inputs.

    The function of the model does not change. Statistics come from one forward pass in
    inference mode; layers inside of layers are found too.

    Args:
        model: A built model.
        x: A batch of inputs.
        epsilon: See `WhitenedDense.set_whitening`.

    Raises:
        ValueError: It has no such layer.

    Example:
        >>> import keras, numpy as np
        >>> from keras_secondorder.layers import rewhiten, whiten
        >>> plain = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        >>> x = np.random.default_rng(0).normal(5.0, 2.0, (64, 3))
        >>> model = whiten(plain)
        >>> rewhiten(model, x)
        >>> np.allclose(model(x), plain(x), atol=1e-4)
        True
    """
    layers = _whitened(model)
    if not layers:
        raise ValueError(
            "The model has no `WhitenedDense` layer. Make one with `whiten(model)`."
        )
    seen = {id(layer): [] for layer in layers}

    def recording(layer):
        forward = layer.call

        def call(inputs, *args, **kwargs):
            seen[id(layer)].append(ops.convert_to_numpy(inputs).astype("float64"))
            return forward(inputs, *args, **kwargs)

        return replaced(layer, call=call)

    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.enter_context(recording(layer))
        model(x, training=False)
    for layer in layers:
        rows = [h.reshape(-1, h.shape[-1]) for h in seen[id(layer)]]
        if rows:
            rows = np.concatenate(rows)
            mean = rows.mean(0)
            centred = rows - mean
            layer.set_whitening(mean, centred.T @ centred / len(rows), epsilon)


def _whitened(layer) -> list:
    own = [layer] if isinstance(layer, WhitenedDense) else []
    return own + [w for child in sublayers(layer) for w in _whitened(child)]


def _double(variable):
    return ops.convert_to_numpy(variable).astype("float64")
