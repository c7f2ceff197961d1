"""What the package asks of a backend: derivatives, and a few kernels.

Three modules answer it, `jax.py`, `tensorflow.py` and `torch.py`; nothing else in the
package knows which one is in use. All of them pass `tests/test_autodiff.py`.

Functions to be differentiated take their parameters as a list of tensors:

    f(primals, tap) -> (outputs, aux)        for vjp
    f(primals) -> outputs                    for jvp and linearize

`outputs` is a list of tensors. `tap(name, tensor)` returns its tensor unchanged and
makes it known by name, so that the gradient at that place can be asked for later.
`aux` is any nest of tensors that is only carried along.

The functions of a backend module:

    vjp(f, primals, taps=True)  -> Linearization
    jvp(f, primals, tangents)   -> (outputs, output tangents)
    linearize(f, primals)       -> (outputs, push), push(tangents) -> output tangents
    hessian_product(f, primals, tangents)
                                -> H v of the scalar f(primals)
    eagerly(function)           -> function(), computed at once, also while a step is
                                   being traced; it may take derivatives
    no_grad()                   -> a context in which no graph is recorded
    spd_inverses(matrices, compiled=False)
                                -> the inverses of symmetric positive definite matrices,
                                   or of stacks of them, shape (k, d, d);
                                   NaN throughout where a factorisation fails;
                                   `compiled` says that the step runs inside XLA

Parameters that an output does not depend on have zero gradients, never `None`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple


class Linearization(NamedTuple):
    """A function at a point, with its reverse pass ready to run.

    Attributes:
        outputs: List of output tensors.
        aux: What the function carried along.
        pullback: Takes one cotangent for each output (or None for zero) and returns
            the gradients with respect to the primals, a list shaped like them.
        pullback_taps: The same with respect to the tapped tensors, a dict by name.
        pullback_all: Both from one reverse pass, `(gradients, tap gradients)`.
    """

    outputs: list
    aux: Any
    pullback: Callable
    pullback_taps: Callable
    pullback_all: Callable
