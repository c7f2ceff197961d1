"""What the package asks of a backend: derivatives, and a few kernels.

Three modules answer it, `jax.py`, `tensorflow.py` and `torch.py`; nothing else in the
package knows which one is in use. All of them pass `tests/test_autodiff.py`. What the
last two answer alike, about leaving compiled functions, is in `eager.py`.

Functions to be differentiated take their parameters as a list of tensors:

    f(primals, tap) -> (outputs, aux)        for vjp and linearize
    f(primals) -> scalar                     for linearize_gradient

`outputs` is a list of tensors. `tap(name, tensor)` returns its tensor unchanged and
makes it known by name, so that the gradient at that place can be asked for later.
`aux` is any nest of tensors that is only carried along.

The functions of a backend module:

    vjp(f, primals, taps=True)        -> Linearization, for reverse passes only
    linearize(f, primals, taps=False) -> Linearization, for both directions
    linearize_gradient(f, primals)    -> (gradient, product), product(v) = H v of the
                                         scalar f(primals)
    compiled(function)                -> the same function, compiled where derivatives
                                         can leave compiled code (JAX)
    portable(product, vector)         -> the function `product` in a form that may be a
                                         result or an argument of a compiled function
    stepwise()                        -> a context in which the loops of `keras.ops` run
                                         in Python, so that they may read data
    eagerly(function)                 -> function(), computed at once, also while a
                                         step is being traced; it may take derivatives
    no_grad()                         -> a context in which no graph is recorded
    random_state()                    -> what draws without a Keras seed depend on
    set_random_state(state)           -> None; such draws are then repeated
    full_precision()                  -> a context in which no device rounds the factors
                                         of float32 products
    interpolate(old, new, weight)     -> old + weight (new - old), for a scalar weight
    inner(a, b)                       -> the sum of a * b over all entries, a scalar
    spd_inverses(matrices, dampings, scales, compiled=False)
                                      -> the inverses of symmetric positive definite
                                         `matrix + damping I`, or of stacks (k, d, d)
                                         of them, factorised after a division by
                                         `scale`; dampings and scales are scalars, or
                                         of shape (k,); NaN throughout where a
                                         factorisation fails; `compiled` says that the
                                         step runs inside XLA
    orthonormal(matrices, compiled=False)
                                      -> for each matrix (d, r) with d >= r, orthonormal
                                         columns of which the first k span what its own
                                         first k do
    symmetric_eigh(matrices, compiled=False)
                                      -> for each symmetric matrix, or stack (k, d, d),
                                         `(values, vectors)`: the eigenvalues, the least
                                         first, shape (d,) or (k, d), and eigenvectors
                                         as columns; NaN throughout where there are none

A linearisation runs the function once: products in a loop at the same point do not
repeat its forward pass. JAX transposes its forward mode. TensorFlow and PyTorch, whose
forward modes run beside the function, differentiate the reverse pass instead: `J^T u`
is linear in `u`, so its derivative with respect to `u`, pulled back, is `J v`.

Parameters that an output does not depend on have zero gradients, never `None`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple


class Linearization(NamedTuple):
    """A function at a point, with its derivatives ready to be multiplied by.

    Attributes:
        outputs: List of output tensors.
        aux: What the function carried along.
        pullback: Takes one cotangent for each output (or None for zero) and returns
            the gradients with respect to the primals, a list shaped like them.
        pullback_taps: The same with respect to the tapped tensors, a dict by name.
        pullback_all: Both from one reverse pass, `(gradients, tap gradients)`.
        push: Takes one tangent for each primal and returns the tangents of the
            outputs; None where only `vjp` was asked for.
    """

    outputs: list
    aux: Any
    pullback: Callable
    pullback_taps: Callable
    pullback_all: Callable
    push: Callable | None = None
