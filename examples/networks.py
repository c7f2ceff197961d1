"""The networks of the examples and benchmarks."""

import keras

import keras_secondorder as kso

WIDTHS = (1000, 500, 250)
CODE = 30
L2 = 1e-5


def classifier(pixels):
    """Builds a classifier, pixels-500-250-10 with rectifiers.

    Args:
        pixels: Number of inputs.

    Returns:
        The model. Its outputs are logits: the loss is told so.
    """
    return keras.Sequential(
        [
            keras.Input((pixels,)),
            keras.layers.Dense(500, activation="relu"),
            keras.layers.Dense(250, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def autoencoder(pixels, seed, widths=WIDTHS, code=CODE, activation="tanh"):
    """Builds a deep autoencoder, by default Martens', pixels-1000-500-250-30 and back.

    Args:
        pixels: Number of inputs and of outputs.
        seed: Seed of the initial weights.
        widths: Units of the layers before the code.
        code: Units of the code layer, which is linear.
        activation: Activation of the other layers.

    Returns:
        The model. Its outputs are logits: a sigmoid makes them pixels.
    """
    everything = (*widths, code, *reversed(widths), pixels)
    model = keras.Sequential([keras.Input((pixels,))])
    for number, width in enumerate(everything):
        linear = number in (len(widths), len(everything) - 1)  # code and logits
        model.add(
            keras.layers.Dense(
                width,
                activation=None if linear else activation,
                kernel_initializer=kso.initializers.Sparse(
                    15, seed=1000 * seed + number
                ),
                # The penalty is (L2 / 2) * sum(w**2): Keras does not halve.
                kernel_regularizer=keras.regularizers.L2(L2 / 2),
            )
        )
    return model


def compile_autoencoder(model, optimizer, **kwargs):
    """Compiles it with sigmoid cross-entropy summed over the pixels.

    Args:
        model: The autoencoder.
        optimizer: A Keras optimizer.
        **kwargs: Other arguments of `compile`.
    """
    model.compile(
        optimizer=optimizer,
        # Keras takes the mean over the pixels; the weight makes it their sum.
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
        loss_weights=float(model.output_shape[-1]),
        **kwargs,
    )
