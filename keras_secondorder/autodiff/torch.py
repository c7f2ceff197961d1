"""The autodiff contract on PyTorch."""

import contextlib

import torch
import torch.nn.attention

from keras_secondorder.autodiff.contract import Linearization

LONG = 65536  # `torch.dot` adds up in a row, so longer ones lose digits


def vjp(f, primals, taps=True):
    """Linearise `f(primals, tap)` for reverse passes (see `contract.py`)."""
    return _reverse(f, primals, taps)[0]


def linearize(f, primals, taps=False):
    """Linearise `f(primals, tap)` for both directions (see `contract.py`)."""
    with torch.enable_grad():
        linear, primals, outputs = _reverse(f, primals, taps)
        u = [torch.zeros_like(o, requires_grad=True) for o in outputs]
        pulled = _gradients(outputs, primals, u, create_graph=True)

    def push(tangents):
        return _gradients(pulled, u, tangents)

    return linear._replace(push=push)


def _reverse(f, primals, taps):
    primals = [p.detach().requires_grad_() for p in primals]
    tapped = {}

    def tap(name, tensor):
        if taps:
            if not tensor.requires_grad:
                tensor = tensor.detach().requires_grad_()
            tapped[name] = tensor
        return tensor

    with torch.enable_grad(), _plain_attention():
        outputs, aux = f(primals, tap)
        outputs = list(outputs)

    def pull(cotangents, sources):
        return _gradients(outputs, sources, cotangents)

    def pullback_taps(cotangents):
        return dict(zip(tapped, pull(cotangents, list(tapped.values())), strict=True))

    def pullback_all(cotangents):
        gradients = pull(cotangents, primals + list(tapped.values()))
        split = len(primals)
        return gradients[:split], dict(zip(tapped, gradients[split:], strict=True))

    linear = Linearization(
        [o.detach() for o in outputs],
        _detach(aux),
        pullback=lambda c: pull(c, primals),
        pullback_taps=pullback_taps,
        pullback_all=pullback_all,
    )
    return linear, primals, outputs


def _detach(tree):
    if isinstance(tree, torch.Tensor):
        return tree.detach()
    if isinstance(tree, dict):
        return {key: _detach(value) for key, value in tree.items()}
    if hasattr(tree, "_fields"):
        return type(tree)(*(_detach(value) for value in tree))
    if isinstance(tree, tuple | list):
        return type(tree)(_detach(value) for value in tree)
    return tree


def _gradients(outputs, sources, cotangents, create_graph=False):
    """Reverse pass from `outputs`; zeros where a source is not reached."""
    given = [
        (o, c.to(o.dtype).expand_as(o))
        for o, c in zip(outputs, cotangents, strict=True)
        if c is not None and o.requires_grad
    ]
    if not given or not sources:
        return [torch.zeros_like(s) for s in sources]
    gradients = torch.autograd.grad(
        [o for o, _ in given],
        sources,
        [c for _, c in given],
        retain_graph=True,
        create_graph=create_graph,
        allow_unused=True,
    )
    return [
        torch.zeros_like(s) if g is None else g
        for g, s in zip(gradients, sources, strict=True)
    ]


def random_state():
    """The state of PyTorch's own generators, from which layers without a seed draw."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return torch.get_rng_state(), cuda


def set_random_state(state):
    """Let them draw again what they drew from this state on."""
    cpu, cuda = state
    torch.set_rng_state(cpu)
    if cuda:
        torch.cuda.set_rng_state_all(cuda)


def _plain_attention():
    """The kernel of attention that is differentiated operation by operation.

    The fused ones have no second derivative. Their first is wrong where a query may see
    no key: Keras adds a large negative number to all of its logits, and the logarithm
    of their sum, which is kept for the reverse pass, does not tell how many they are.
    """
    return torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.MATH])


def linearize_gradient(f, primals):
    """The gradient of the scalar `f(primals)`, and `v -> H v`: reverse over reverse."""
    primals = [p.detach().requires_grad_() for p in primals]
    with torch.enable_grad(), _plain_attention():
        value = f(primals)
        gradient = _gradients([value], primals, [torch.ones_like(value)], True)

    def product(tangents):
        return _gradients(gradient, primals, tangents)

    return [g.detach() for g in gradient], product


def eagerly(function):
    """The value of `function()`: PyTorch computes at once."""
    return function()


def no_grad():
    """A context in which PyTorch records no graph."""
    return torch.no_grad()


def interpolate(old, new, weight):
    """`old + weight (new - old)`."""
    return torch.lerp(old, new.to(old.dtype), weight.to(old.dtype))


def inner(a, b):
    """The sum of `a * b` over all entries."""
    if a.numel() > LONG:
        return (a * b).sum()
    return torch.dot(a.reshape(-1), b.reshape(-1))


def full_precision():
    """Nothing to ask for: PyTorch rounds the factors of no float32 product unasked."""
    return contextlib.nullcontext()


def spd_inverses(matrices, dampings, scales, compiled=False):
    """Invert damped positive definite matrices; NaN where one is not definite.

    Each is inverted in the one copy that is made of it.
    """
    inverses = []
    for matrix, damping, scale in zip(matrices, dampings, scales, strict=True):
        # Column by column, as LAPACK reads it; else it would make copies of its own.
        work = matrix.mT.clone(memory_format=torch.contiguous_format).mT
        work.diagonal(dim1=-2, dim2=-1).add_(damping[..., None])
        work.div_(scale[..., None, None])
        failed = torch.empty(matrix.shape[:-2], dtype=torch.int32, device=matrix.device)
        torch.linalg.cholesky_ex(work, out=(work, failed))
        torch.cholesky_inverse(work, out=work).div_(scale[..., None, None])
        inverses.append(work.masked_fill_((failed != 0)[..., None, None], float("nan")))
    return inverses


def orthonormal(matrices, compiled=False):
    """Orthonormal bases."""
    return [torch.linalg.qr(m)[0] for m in matrices]


def symmetric_eigh(matrices, compiled=False):
    """Eigenvalues and eigenvectors; NaN where there are none."""
    pairs = []
    for matrix in matrices:
        sound = torch.isfinite(matrix).all(-1, True).all(-2, True)
        identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
        try:
            values, vectors = torch.linalg.eigh(torch.where(sound, matrix, identity))
        except torch.linalg.LinAlgError:  # the iteration did not converge
            values, vectors, sound = matrix[..., 0], matrix, torch.zeros_like(sound)
        nan = torch.full_like(vectors, float("nan"))
        vectors = torch.where(sound, vectors, nan)
        pairs.append((torch.where(sound[..., 0], values, nan[..., 0]), vectors))
    return pairs
