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


def rectifier_network(shape, classes=10):
    """Builds a classifier of images with four hidden layers of 500 rectifiers.

    Args:
        shape: Height, width and channels of an image.
        classes: Number of classes.

    Returns:
        The model. Its outputs are logits.
    """
    hidden = [
        keras.layers.Dense(500, activation="relu", kernel_initializer="he_normal")
        for _ in range(4)
    ]
    return keras.Sequential(
        [
            keras.Input(shape),
            keras.layers.Flatten(),
            *hidden,
            keras.layers.Dense(classes),
        ]
    )


def convolutional_network(shape, classes=10, channels=(16, 32, 64)):
    """Builds a classifier of images with three stages of convolution.

    Args:
        shape: Height, width and channels of an image.
        classes: Number of classes.
        channels: Channels of the three stages; each halves height and width.

    Returns:
        The model. Its outputs are logits.
    """
    model = keras.Sequential([keras.Input(shape)])
    for width in channels:
        model.add(keras.layers.Conv2D(width, 3, padding="same", use_bias=False))
        # The moving averages have to keep up with a training of few steps.
        model.add(keras.layers.BatchNormalization(momentum=0.9))
        model.add(keras.layers.ReLU())
        model.add(keras.layers.MaxPooling2D(2))
    model.add(keras.layers.Flatten())
    model.add(keras.layers.Dropout(0.5))
    model.add(keras.layers.Dense(classes))
    return model


def character_transformer(length, characters, width=64, heads=4, blocks=2):
    """Builds a causal transformer that predicts the next character.

    Args:
        length: Characters in a sequence.
        characters: Size of the alphabet.
        width: Features of a character.
        heads: Attention heads.
        blocks: Number of blocks.

    Returns:
        The model, from (batch, length) indices to (batch, length, characters) logits.
    """
    layers = keras.layers
    ids = keras.Input((length,), dtype="int32")
    positions = keras.ops.zeros_like(ids) + keras.ops.arange(length, dtype="int32")
    h = layers.Embedding(characters, width)(ids)
    h = h + layers.Embedding(length, width)(positions)
    for _ in range(blocks):
        n = layers.LayerNormalization()(h)
        attention = layers.MultiHeadAttention(heads, width // heads)
        h = h + attention(n, n, use_causal_mask=True)
        n = layers.LayerNormalization()(h)
        n = layers.Dense(4 * width, activation="gelu")(n)
        h = h + layers.Dense(width)(n)
    h = layers.LayerNormalization()(h)
    return keras.Model(ids, layers.Dense(characters)(h))


def autoencoder(
    pixels, seed, widths=WIDTHS, code=CODE, activation="tanh", initializer=None
):
    """Builds a deep autoencoder, by default Martens', pixels-1000-500-250-30 and back.

    Args:
        pixels: Number of inputs and of outputs.
        seed: Seed of the initial weights.
        widths: Units of the layers before the code.
        code: Units of the code layer, which is linear.
        activation: Activation of the other layers.
        initializer: Initializer of the kernels, by default the sparse one.

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
                kernel_initializer=initializer
                or kso.initializers.Sparse(15, seed=1000 * seed + number),
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
