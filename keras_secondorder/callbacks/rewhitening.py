"""Whitened layers that follow what they see."""

import keras

from keras_secondorder.arguments import check_count, check_range
from keras_secondorder.layers import rewhiten


class Rewhitening(keras.callbacks.Callback):
    """Call `rewhiten(model, x, epsilon)` at the start and every so many batches.

    With gradient descent this is the training of natural neural networks: natural
    gradient steps between two estimates of the whitening.

    Args:
        x: A batch of inputs, some hundred to some thousand.
        every: Batches between two estimates.
        epsilon: See `WhitenedDense.set_whitening`.

    Raises:
        ValueError: A number outside its range; `fit` is given a model without such
            layers.

    References:
        Desjardins, Simonyan, Pascanu & Kavukcuoglu (2015), algorithm 1; George (2017),
        thesis, section 6.5.2.
    """

    def __init__(self, x, every: int = 100, epsilon: float = 0.1):
        super().__init__()
        check_count("every", every)
        check_range("epsilon", epsilon, 0)
        self.x = x
        self.every = every
        self.epsilon = epsilon
        self._batches = 0

    def on_train_begin(self, logs=None):
        """Whiten before the first batch."""
        self._batches = 0
        rewhiten(self.model, self.x, self.epsilon)

    def on_train_batch_end(self, batch, logs=None):
        """Whiten where it is time."""
        self._batches += 1
        if self._batches % self.every == 0:
            if keras.config.backend() == "jax":
                # In `fit` on JAX the weights live in the trainer's state.
                self.model.jax_state_sync()
            rewhiten(self.model, self.x, self.epsilon)
