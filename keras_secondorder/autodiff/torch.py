"""The autodiff contract on PyTorch."""

import torch
import torch.nn.attention

from keras_secondorder.autodiff.contract import Linearization


def vjp(f, primals, taps=True):
    """Linearise `f(primals, tap)` for reverse passes (see `contract.py`)."""
    primals = [p.detach().requires_grad_() for p in primals]
    tapped = {}

    def tap(name, tensor):
        if taps:
            if not tensor.requires_grad:
                tensor = tensor.detach().requires_grad_()
            tapped[name] = tensor
        return tensor

    with torch.enable_grad():
        outputs, aux = f(primals, tap)
        outputs = list(outputs)

    def pull(cotangents, sources):
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
            allow_unused=True,
        )
        return [
            torch.zeros_like(s) if g is None else g
            for g, s in zip(gradients, sources, strict=True)
        ]

    def pullback_taps(cotangents):
        return dict(zip(tapped, pull(cotangents, list(tapped.values())), strict=True))

    def pullback_all(cotangents):
        gradients = pull(cotangents, primals + list(tapped.values()))
        split = len(primals)
        return gradients[:split], dict(zip(tapped, gradients[split:], strict=True))

    return Linearization(
        [o.detach() for o in outputs],
        _detach(aux),
        pullback=lambda c: pull(c, primals),
        pullback_taps=pullback_taps,
        pullback_all=pullback_all,
    )


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


def jvp(f, primals, tangents):
    """Outputs of `f(primals)` and their derivative along `tangents`."""
    tangents = [t.to(p.dtype) for t, p in zip(tangents, primals, strict=True)]
    with _differentiable_attention():
        return torch.func.jvp(
            lambda *p: list(f(list(p))), tuple(primals), tuple(tangents)
        )


def _differentiable_attention():
    """The kernel of attention that has a forward mode; the fused ones have none."""
    return torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.MATH])


def linearize(f, primals):
    """Outputs of `f(primals)`, and a function that pushes tangents forward."""
    with torch.no_grad():
        outputs = list(f(primals))
    return outputs, lambda tangents: jvp(f, primals, tangents)[1]


def hessian_product(f, primals, tangents):
    """`H v` of the scalar `f(primals)`, forward over reverse."""
    tangents = [t.to(p.dtype) for t, p in zip(tangents, primals, strict=True)]
    with torch.enable_grad(), _differentiable_attention():
        gradient = torch.func.grad(lambda p: f(list(p)))
        point = [p.detach() for p in primals]
        return torch.func.jvp(gradient, (point,), (tangents,))[1]


def eagerly(function):
    """The value of `function()`: PyTorch computes at once."""
    return function()


def no_grad():
    """A context in which PyTorch records no graph."""
    return torch.no_grad()


def spd_inverses(matrices, compiled=False):
    """Invert positive definite matrices, or stacks; NaN where one is not definite."""
    inverses = []
    for matrix in matrices:
        factor, failed = torch.linalg.cholesky_ex(matrix)
        inverse = torch.cholesky_inverse(factor)
        nan = torch.full_like(inverse, float("nan"))
        inverses.append(torch.where((failed == 0)[..., None, None], inverse, nan))
    return inverses
