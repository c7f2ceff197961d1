"""SimpleRNN, LSTM and GRU: two affine maps, used at every time step."""

import contextlib

import keras
from keras import ops

from keras_secondorder.capture.wrapper import (
    LayerWrapper,
    register_layer_wrapper,
    replaced,
    rows,
    stacked,
    unstacked,
    with_ones,
)

CELLS = (
    keras.layers.SimpleRNNCell,
    keras.layers.LSTMCell,
    keras.layers.GRUCell,
)


@register_layer_wrapper(
    keras.layers.SimpleRNN, keras.layers.LSTM, keras.layers.GRU, keras.layers.RNN
)
class RecurrentWrapper(LayerWrapper):
    """`s_t = x_t @ kernel + h_{t-1} @ recurrent_kernel + bias` at every time step t.

    The gradient at each `s_t` is that of a zero probe `(N, T, gates)` beside the
    sequence: the cell splits it off at each step and adds it to its bias. The states
    `h_{t-1}` are the outputs of the steps before. A GRU that resets after the product
    has two pre-activations, one for each kernel.

    References:
        Martens, Ba & Johnson (2018), *Kronecker-factored curvature approximations for
        recurrent neural networks*, section 3, with independent time steps.
    """

    @classmethod
    def reason_against(cls, layer):
        """What the probe beside the sequence cannot see."""
        cell = layer.cell
        if type(cell) not in CELLS:
            return f"runs the cell {type(cell).__name__} in its loop"
        if getattr(cell, "implementation", 2) == 1:
            return "implementation=1 (or recurrent_dropout) takes its kernels apart"
        if not (cell.kernel.trainable and cell.recurrent_kernel.trainable):
            return "a kernel is frozen"
        if cell.bias is not None and not cell.bias.trainable:
            return "its bias is frozen"
        if layer.unroll and layer.go_backwards and layer.zero_output_for_mask:
            return "unrolled backwards, it zeroes other steps than the masked ones"
        if not _one_product(cell):
            return "reset_after=False multiplies the state by a gate first"
        return None

    @property
    def _cell(self):
        return self.layer.cell

    @property
    def variables(self):
        """`[kernel, recurrent_kernel]`, and the bias."""
        cell = self._cell
        bias = [] if cell.bias is None else [cell.bias]
        return [cell.kernel, cell.recurrent_kernel, *bias]

    @property
    def parts(self):
        """The map of the inputs with the bias, and the map of the states."""
        return [_InputMap(self.layer), _StateMap(self.layer)]

    def split(self, values):
        """The bias goes with the inputs; a GRU has one for each kernel."""
        kernel, recurrent, *bias = values
        if bias and _two_biases(self._cell):
            return [[kernel, bias[0][0]], [recurrent, bias[0][1]]]
        return [[kernel, *bias], [recurrent]]

    def join(self, parts):
        """The inverse of `split`."""
        (kernel, *bias), (recurrent, *recurrent_bias) = parts
        if recurrent_bias:
            bias = [ops.stack([*bias, *recurrent_bias])]
        return [kernel, recurrent, *bias]

    @contextlib.contextmanager
    def record(self, on_input, on_preactivation):
        """Run the loop on the sequence with the probe beside it."""
        layer, cell = self.layer, self._cell
        inner_loop, step = layer.inner_loop, cell.call
        width = cell.kernel.shape[-1]
        probes = 2 if _two_biases(cell) else 1

        def probed_step(inputs, states, training=False):
            features = inputs.shape[-1] - probes * width
            probe = inputs[:, features:]
            with replaced(cell, **_shifted_bias(cell, probe, width)):
                return step(inputs[:, :features], states, training=training)

        def watched_loop(sequences, initial_state, mask, training=False):
            shape = (*ops.shape(sequences)[:2], probes * width)
            probe = on_preactivation(ops.zeros(shape, sequences.dtype))
            with replaced(cell, call=probed_step), replaced(layer, **whole):
                last, outputs, states = inner_loop(
                    ops.concatenate([sequences, probe], axis=-1),
                    initial_state,
                    mask,
                    training,
                )
            on_input(self._seen(sequences, outputs, initial_state, training))
            if mask is not None and layer.zero_output_for_mask:
                outputs = self._without_masked(outputs, mask)
                last = outputs[:, -1]
            return last, outputs, states

        # Outputs at masked steps are the states before; zeros would hide them.
        whole = {"return_sequences": True, "zero_output_for_mask": False}
        if hasattr(layer, "use_cudnn"):
            whole["use_cudnn"] = False
        # A layer that fuses both directions asks before it calls either of them.
        flags = {name: whole[name] for name in whole if name == "use_cudnn"}
        with replaced(layer, inner_loop=watched_loop, **flags):
            yield

    def _without_masked(self, outputs, mask):
        """Zeros at the masked steps, as `zero_output_for_mask` asks for."""
        kept = ops.cast(keras.tree.flatten(mask)[0], outputs.dtype)
        if self.layer.go_backwards:
            kept = ops.flip(kept, axis=1)
        return outputs * kept[..., None]

    def _seen(self, sequences, outputs, initial_state, training):
        """`(x, h)`: what the two kernels are multiplied by, in the order of `x`."""
        first = keras.tree.flatten(initial_state)[0]
        before = ops.concatenate(
            [ops.cast(first, outputs.dtype)[:, None], outputs[:, :-1]], axis=1
        )
        if self.layer.go_backwards:
            before = ops.flip(before, axis=1)
        cell = self._cell
        if training and cell.dropout:
            kept = cell.get_dropout_mask(sequences[:, 0, :])
            sequences = sequences * kept[:, None]
        if training and cell.recurrent_dropout:
            kept = cell.get_recurrent_dropout_mask(first)
            before = before * kept[:, None]
        return (sequences, before)


def _two_biases(cell) -> bool:
    """Whether the two kernels have separate pre-activations."""
    return isinstance(cell, keras.layers.GRUCell)


def _one_product(cell) -> bool:
    """Whether the state is multiplied by the recurrent kernel as it is."""
    return not isinstance(cell, keras.layers.GRUCell) or cell.reset_after


def _shifted_bias(cell, probe, width: int) -> dict:
    """Attributes under which the cell adds the probe to its pre-activation."""
    bias = cell.bias
    if not _two_biases(cell):
        if bias is not None:
            probe = probe + ops.cast(bias, probe.dtype)
        return {"bias": probe, "use_bias": True}
    probe = ops.stack([probe[:, :width], probe[:, width:]])  # (2, N, gates)
    if bias is not None:
        probe = probe + ops.cast(bias, probe.dtype)[:, None]
    return {"bias": probe, "use_bias": True}


class _Map(LayerWrapper):
    """One kernel of the cell, with its bias; what both of them share."""

    which: int

    @property
    def variables(self):
        cell = self.layer.cell
        return [(cell.kernel, cell.recurrent_kernel)[self.which]]

    @property
    def has_bias(self):
        cell = self.layer.cell
        return cell.bias is not None and (self.which == 0 or _two_biases(cell))

    @property
    def d_in(self):
        return self.variables[0].shape[0] + self.has_bias

    @property
    def d_out(self):
        return self.variables[0].shape[1]

    def input_rows(self, inputs):
        flat = rows(inputs[self.which], self.variables[0].shape[0])
        return with_ones(flat) if self.has_bias else flat

    def gradient_rows(self, gradient):
        start = self.which * self.d_out if _two_biases(self.layer.cell) else 0
        return rows(gradient[..., start : start + self.d_out], self.d_out)

    def to_matrix(self, values):
        return stacked(values)

    def from_matrix(self, matrix):
        return unstacked(matrix, self.has_bias)


class _InputMap(_Map):
    which = 0


class _StateMap(_Map):
    which = 1
