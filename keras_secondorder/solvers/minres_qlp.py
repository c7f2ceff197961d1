"""MINRES-QLP: the shortest least-squares solution of a symmetric system."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from keras import ops

from keras_secondorder.solvers.result import (
    Estimates,
    Solution,
    Status,
    as_flat_vector,
    check_iterations,
    divide,
    hypot,
    inner,
    larger,
    largest,
    norm,
    smaller,
    verdict,
)


class _Krylov(NamedTuple):
    """Preconditioned Lanczos: T's columns, and the vectors that continue it."""

    v_old: Any  # v_{k-1}
    v: Any  # v_k
    u: Any  # M^-1 v_k
    beta: Any  # T_{k,k-1}, zero for k = 1


class _Factors(NamedTuple):
    """What the two-sided (QLP) factorisation of T still needs, all scalars.

    L is lower triangular with the bands gamma (diagonal), theta and eta; `_old` is
    row k-1 and `_older` row k-2. The solution is x = W mu with L mu = tau.
    """

    c: Any
    s: Any
    delta: Any  # T_{k-1,k} after the left reflections before the last one
    epsilon: Any  # R_{k-2,k}, final
    phi: Any  # ||r_{k-1}||
    gamma_older: Any
    gamma_old: Any
    theta_older: Any
    theta_old: Any
    eta_older: Any
    eta_old: Any
    tau_older: Any
    tau_old: Any
    mu: Any  # (4,), mu_{k-4} ... mu_{k-1}; the first two are final


class _Iterate(NamedTuple):
    """The solution, and the two columns of D (MINRES) or W (QLP) it is built on."""

    w_older: Any
    w_old: Any
    x_base: Any  # QLP: the part of x that no later reflection changes
    x: Any
    is_qlp: Any


class _Monitor(NamedTuple):
    matrix_norm: Any
    gamma_min: Any
    base_norm: Any  # the length of the final part of mu
    solution_norm: Any
    residual_norm: Any
    normal_residual_norm: Any
    condition: Any


class _State(NamedTuple):
    k: Any
    krylov: _Krylov
    factors: _Factors
    iterate: _Iterate
    monitor: _Monitor
    status: Any


def minres_qlp(
    matvec: Callable[[Any], Any],
    b: Any,
    *,
    shift: Any = 0.0,
    preconditioner: Callable[[Any], Any] | None = None,
    rtol: Any = None,
    max_iterations: Any = None,
    maxxnorm: Any = None,
    acondlim: Any = None,
    trancond: Any = None,
) -> Solution:
    """Solve (A - shift I) x = b for symmetric A: least squares, minimum length.

    A may be indefinite and singular, and the system inconsistent. Iteration k adds
    a column to the Lanczos matrix T, to its factors Q T P = L, and to x = W mu:

    ```
    p        = (A - shift I) u_k - beta_k v_{k-1}          # Lanczos, u = M^-1 v
    alpha    = u_k^T p;  p = p - alpha v_k
    beta     = sqrt(p^T M^-1 p);  v_{k+1} = p / beta
    delta, gamma = [c s; s -c] [delta; alpha]              # last left reflection
    c, s, gamma  = reflection(gamma, beta)                 # this left reflection
    tau, phi     = c phi, s phi                            # phi = ||r_k||
    (k-2, k): gamma_{k-2}, theta_{k-1}, delta, gamma, eta  # right reflections:
    (k-1, k): gamma_{k-1}, theta_k, gamma                  #   columns of L and W
    mu_i     = (tau_i - eta_i mu_{i-2} - theta_i mu_{i-1}) / gamma_i,  i = k-2 ... k
    x        = sum of w_i mu_i
    ```

    While the condition estimate is below `trancond` the cheaper MINRES update
    d_k = (u_k - delta d_{k-1} - epsilon d_{k-2}) / gamma, x = x + tau d_k stands in
    for the last line, and W = D L moves to the QLP form. Where gamma_k is a zero of
    a singular system, mu_k = 0 is what makes x the shortest solution.

    Args:
        matvec: x -> A x for a flat x of shape (n,).
        b: shape (n,), float32 or float64; the result has its dtype.
        shift: a scalar.
        preconditioner: r -> M^-1 r for a symmetric positive definite M. Lengths are
            then measured in M (x) and M^-1 (residuals), the minimum ones too.
            Default: the identity.
        rtol: stop when ||r|| <= rtol (||A|| ||x|| + ||b||), or when
            ||A r|| <= rtol ||A|| ||r||. Default and least value: 10 times the
            machine epsilon.
        max_iterations: an int. Default: 4 n.
        maxxnorm: the largest ||x|| allowed. Default: no limit.
        acondlim: the largest condition number allowed; gammas below ||A|| / acondlim
            count as zero. Default: machine epsilon ** (-2/3), 4e4 or 3e10, where what
            dropping a direction costs is about what rounding along it would.
        trancond: the condition number from which on the QLP update is used; 1 uses
            it from the start. Default: 1 / sqrt(machine epsilon).

    Returns:
        A `Solution` with its `estimates`.

    Raises:
        ValueError: `b` is not a flat float32 or float64 vector.

    Example:
        >>> import numpy as np
        >>> from keras import ops
        >>> a = ops.convert_to_tensor([2.0, -1.0, 0.0])  # singular and indefinite
        >>> b = ops.convert_to_tensor([2.0, 2.0, 3.0])  # 3 is out of reach
        >>> solution = minres_qlp(lambda x: a * x, b)
        >>> print(np.abs(np.round(ops.convert_to_numpy(solution.x), 4)))
        [1. 2. 0.]

    References:
        Choi, Paige and Saunders, "MINRES-QLP: a Krylov subspace method for indefinite
        or singular symmetric systems", SIAM J. Sci. Comput. 33(4), 2011: the table
        of algorithm MINRES-QLP, the transfer from MINRES and the norm estimates, in
        its preconditioned form; Choi and Saunders, "Algorithm 937", ACM Trans. Math.
        Softw. 40(2), 2014, lists it again. We differ in setting mu_k = 0 as soon as
        ||A r|| or the condition says gamma_k is zero, where the paper first lets x
        grow to its limit; in default limits; and in having no limit on ||x||.
    """
    b, dtype, machine_epsilon = as_flat_vector(b, "b")

    def scalar(value: Any, default: float) -> Any:
        value = default if value is None else value
        return ops.convert_to_tensor(value, dtype=dtype)

    tiniest = scalar(10 * machine_epsilon, 0.0)
    limits = _Limits(
        rtol=larger(scalar(rtol, 0.0), tiniest),
        maxxnorm=scalar(maxxnorm, np.inf),
        acondlim=scalar(acondlim, machine_epsilon ** (-2 / 3)),
        trancond=scalar(trancond, machine_epsilon**-0.5),
    )
    max_iterations = 4 * b.shape[0] if max_iterations is None else max_iterations
    check_iterations(max_iterations)
    shift = scalar(shift, 0.0)

    def multiply(u: Any) -> Any:
        return ops.stop_gradient(ops.cast(matvec(u), dtype)) - shift * u

    def precondition(r: Any) -> tuple[Any, Any, Any]:
        """Return M^-1 r, the M^-1 length of r, and whether M looks indefinite."""
        if preconditioner is None:
            return r, norm(r), ops.zeros((), dtype="bool")
        y = ops.stop_gradient(ops.cast(preconditioner(r), dtype))
        product = inner(r, y)
        # Below rounding a negative product says nothing about M.
        noise = 10 * machine_epsilon * norm(r) * norm(y)
        return y, ops.sqrt(larger(product, ops.zeros_like(product))), product < -noise

    def step(state: _State) -> tuple[_State]:
        v, u = state.krylov.v, state.krylov.u
        p = multiply(u) - state.krylov.beta * state.krylov.v_old
        alpha = inner(u, p)
        p = p - alpha * v
        y, beta, is_indefinite = precondition(p)
        krylov = _Krylov(v, divide(p, beta), divide(y, beta), beta)
        return (_advance(state, alpha, u, krylov, is_indefinite, beta1, limits),)

    u1, beta1, is_indefinite = precondition(b)
    zero, nothing, no_mu = ops.zeros_like(beta1), ops.zeros_like(b), ops.zeros(4, dtype)
    start = _State(
        k=ops.zeros((), dtype="int32"),
        krylov=_Krylov(nothing, divide(b, beta1), divide(u1, beta1), zero),
        # c = -1 and s = 0 pass the first column through; nothing else has happened.
        factors=_Factors(-zero - 1, zero, zero, zero, beta1, *[zero] * 8, no_mu),
        iterate=_Iterate(*[nothing] * 4, limits.trancond <= 1),
        monitor=_Monitor(zero, zero + np.inf, zero, zero, beta1, zero, zero + 1),
        status=verdict(
            (ops.logical_not(ops.isfinite(beta1)), Status.NON_FINITE),
            (is_indefinite, Status.INDEFINITE_PRECONDITIONER),
            (beta1 == 0, Status.RESIDUAL),
        ),
    )

    def goes_on(state: _State) -> Any:
        running = state.status == int(Status.RUNNING)
        return ops.logical_and(running, state.k < max_iterations)

    (end,) = ops.while_loop(goes_on, step, (start,))
    limit = ops.full((), int(Status.MAX_ITERATIONS), dtype="int32")
    status = ops.where(end.status == int(Status.RUNNING), limit, end.status)
    seen = end.monitor
    estimates = Estimates(
        seen.normal_residual_norm, seen.matrix_norm, seen.condition, seen.solution_norm
    )
    x, residual_norm = end.iterate.x, seen.residual_norm
    return Solution(x, status, end.k, residual_norm, estimates=estimates)


class _Limits(NamedTuple):
    rtol: Any
    maxxnorm: Any
    acondlim: Any
    trancond: Any


def _advance(
    state: _State,
    alpha: Any,
    u: Any,
    krylov: _Krylov,
    is_indefinite: Any,
    beta1: Any,
    limits: _Limits,
) -> _State:
    """Take column k of T into the factors, and the factors into x."""
    f, m = state.factors, state.monitor
    beta, phi_old = krylov.beta, f.phi

    # Left reflections: column k of R is (epsilon, delta, gamma).
    delta, gamma = f.c * f.delta + f.s * alpha, f.s * f.delta - f.c * alpha
    epsilon_next, delta_next = f.s * beta, -f.c * beta
    normal_residual_norm = phi_old * hypot(gamma, delta_next)
    c, s, gamma = _reflection(gamma, beta)
    tau, phi = c * phi_old, s * phi_old
    gamma_r, delta_r = gamma, delta  # R's own entries, which MINRES needs

    # Right reflection of columns k-2 and k: epsilon becomes zero.
    c2, s2, gamma_older = _reflection(f.gamma_older, f.epsilon)
    theta_older, delta = (
        c2 * f.theta_old + s2 * delta,
        s2 * f.theta_old - c2 * delta,
    )
    eta, gamma = s2 * gamma, -c2 * gamma
    # Right reflection of columns k-1 and k: delta becomes zero.
    c3, s3, gamma_old = _reflection(f.gamma_old, delta)
    theta, gamma = s3 * gamma, -c3 * gamma

    # Norms: of A by the columns of T and L, the condition by the gammas.
    column = hypot(hypot(state.krylov.beta, alpha), beta)
    matrix_norm = largest(m.matrix_norm, column, gamma_older, gamma_old, gamma)
    # The first two steps meet columns k-2 and k-1 that do not exist yet.
    gamma_min = ops.where(state.k < 2, m.gamma_min, smaller(m.gamma_min, gamma_older))
    gamma_min_old = ops.where(state.k < 1, gamma_min, smaller(gamma_min, gamma_old))
    zero_ratio = larger(limits.rtol, 1 / limits.acondlim)
    is_null = normal_residual_norm <= zero_ratio * matrix_norm * phi_old
    is_ill = ops.abs(gamma) * limits.acondlim <= matrix_norm

    # Forward substitution for the last three of L mu = tau.
    mu4, mu3 = f.mu[0], f.mu[1]
    mu2 = divide(f.tau_older - f.eta_older * mu4 - f.theta_older * mu3, gamma_older)
    mu1 = divide(f.tau_old - f.eta_old * mu3 - theta_older * mu2, gamma_old)
    rest = tau - eta * mu2 - theta * mu1
    mu0 = divide(rest, gamma)
    base_norm = hypot(m.base_norm, mu2)
    shorter_norm = hypot(base_norm, mu1)
    is_long = hypot(shorter_norm, mu0) > limits.maxxnorm
    is_dropped = is_null | is_ill | is_long
    mu0 = ops.where(is_dropped, ops.zeros_like(mu0), mu0)
    solution_norm = hypot(shorter_norm, mu0)
    residual_norm = ops.where(is_dropped, hypot(phi, rest), phi)
    condition = matrix_norm / ops.where(
        is_dropped, gamma_min_old, smaller(gamma_min_old, ops.abs(gamma))
    )

    is_qlp = state.iterate.is_qlp | is_dropped | (condition >= limits.trancond)
    iterate = ops.cond(
        is_qlp,
        lambda: _qlp(state.iterate, f, u, (c2, s2, c3, s3), (mu2, mu1, mu0)),
        lambda: _minres(state.iterate, u, (f.epsilon, delta_r, gamma_r), tau),
    )

    scalars = alpha + beta + residual_norm + solution_norm
    is_finite = ops.isfinite(scalars) & ops.isfinite(ops.sum(iterate.x))
    # A component that is long only because gamma is nearly zero earns no tolerance.
    goal = limits.rtol * (matrix_norm * shorter_norm + beta1)
    status = verdict(
        (ops.logical_not(is_finite), Status.NON_FINITE),
        (is_indefinite, Status.INDEFINITE_PRECONDITIONER),
        (solution_norm > limits.maxxnorm, Status.SOLUTION_NORM),
        (residual_norm <= goal, Status.RESIDUAL),
        (is_null, Status.LEAST_SQUARES),
        (is_ill, Status.ILL_CONDITIONED),
        (is_long, Status.SOLUTION_NORM),
    )
    taken = is_finite & (solution_norm <= limits.maxxnorm) & ~is_indefinite
    x = ops.where(taken, iterate.x, state.iterate.x)
    monitor = _Monitor(
        matrix_norm,
        gamma_min,
        base_norm,
        ops.where(taken, solution_norm, m.solution_norm),
        ops.where(taken, residual_norm, m.residual_norm),
        normal_residual_norm,
        condition,
    )
    factors = _Factors(
        c=c,
        s=s,
        delta=delta_next,
        epsilon=epsilon_next,
        phi=phi,
        gamma_older=gamma_old,
        gamma_old=gamma,
        theta_older=theta_older,
        theta_old=theta,
        eta_older=f.eta_old,
        eta_old=eta,
        tau_older=f.tau_old,
        tau_old=tau,
        mu=ops.stack([mu3, mu2, mu1, mu0]),
    )
    k = state.k + ops.cast(taken, "int32")
    return _State(k, krylov, factors, iterate._replace(x=x), monitor, status)


def _minres(old: _Iterate, u: Any, column: tuple[Any, ...], tau: Any) -> _Iterate:
    """Add tau d_k to x, where D R = V."""
    epsilon, delta, gamma = column
    d = divide(u - delta * old.w_old - epsilon * old.w_older, gamma)
    return _Iterate(old.w_old, d, old.x_base, old.x + tau * d, old.is_qlp)


def _qlp(
    old: _Iterate,
    f: _Factors,
    u: Any,
    rotation: tuple[Any, ...],
    mu: tuple[Any, ...],
) -> _Iterate:
    """Reflect the last columns of W as those of L, and rebuild x on them."""
    c2, s2, c3, s3 = rotation
    mu2, mu1, mu0 = mu

    def transfer() -> tuple[Any, Any, Any]:
        # W = D L, of which D and L keep the last two columns and rows.
        w_older = f.gamma_older * old.w_older + f.theta_old * old.w_old
        w_old = f.gamma_old * old.w_old
        return w_older, w_old, old.x - f.mu[2] * w_older - f.mu[3] * w_old

    w_older, w_old, x_base = ops.cond(
        old.is_qlp, lambda: (old.w_older, old.w_old, old.x_base), transfer
    )
    w_older, w = c2 * w_older + s2 * u, s2 * w_older - c2 * u
    w_old, w = c3 * w_old + s3 * w, s3 * w_old - c3 * w
    x_base = x_base + mu2 * w_older
    x = x_base + mu1 * w_old + mu0 * w
    return _Iterate(w_old, w, x_base, x, ops.ones_like(old.is_qlp))


def _reflection(a: Any, b: Any) -> tuple[Any, Any, Any]:
    """Return c, s, r with [c s; s -c] [a; b] = [r; 0] and r >= 0."""
    r = hypot(a, b)
    c = ops.where(r > 0, divide(a, r), ops.ones_like(a))
    return c, divide(b, r), r
