"""The contract of `autodiff/contract.py`, eagerly and inside compiled functions."""

import keras
import numpy as np
import pytest
from keras import ops
from modes import BACKEND, MODES

from keras_secondorder import autodiff

# float32 products of a handful of numbers of order 1.
RTOL = 1e-5


@pytest.fixture(params=list(MODES))
def computed(request):
    """Run a function of tensors in one mode; NumPy arrays in and out."""

    def run(f, *arrays):
        with autodiff.no_grad():
            result = MODES[request.param](f)(
                *[ops.convert_to_tensor(np.asarray(a, "float32")) for a in arrays]
            )
        return keras.tree.map_structure(ops.convert_to_numpy, result)

    return run


RNG = np.random.default_rng(0)
X = RNG.normal(size=(4, 3)).astype("float32")
W = RNG.normal(size=(3, 2)).astype("float32")
B = RNG.normal(size=(2,)).astype("float32")
UNUSED = RNG.normal(size=(5,)).astype("float32")
S = X @ W + B
H = np.tanh(S)
C = RNG.normal(size=(4, 2)).astype("float32")  # a cotangent of the second output
C_TIMES_SLOPE = C * (1 - H**2)
POINT = (W, B, UNUSED)


def network(primals, tap=lambda name, tensor: tensor):
    """`([sum of the weights squared, tanh(x w + b)], aux)`."""
    w, b, _ = primals
    s = tap("s", ops.matmul(ops.convert_to_tensor(X), w) + b)
    return [ops.sum(w * w), ops.tanh(s)], {"s": s, "pair": (b, [w])}


def test_vjp_gives_outputs_and_carries_aux(computed):
    def f(*primals):
        linear = autodiff.vjp(network, list(primals))
        return list(linear.outputs), linear.aux

    (square, h), aux = computed(f, *POINT)
    np.testing.assert_allclose(square, np.sum(W**2), rtol=RTOL)
    np.testing.assert_allclose(h, H, rtol=RTOL, atol=RTOL)
    np.testing.assert_allclose(aux["s"], S, rtol=RTOL, atol=RTOL)
    np.testing.assert_array_equal(aux["pair"][0], B)
    np.testing.assert_array_equal(aux["pair"][1][0], W)


@pytest.mark.parametrize("taps", [True, False])
@pytest.mark.parametrize("seed", [None, 2.0])
def test_pullback_adds_the_outputs_up_and_fills_in_zeros(computed, seed, taps):
    """None is a zero cotangent; a parameter that nothing reaches has gradient zero."""

    def f(*primals):
        linear = autodiff.vjp(network, list(primals), taps=taps)
        first = None if seed is None else ops.convert_to_tensor(np.float32(seed))
        return linear.pullback([first, ops.convert_to_tensor(C)])

    w, b, unused = computed(f, *POINT)
    expected = X.T @ C_TIMES_SLOPE + (seed or 0.0) * 2 * W
    np.testing.assert_allclose(w, expected, rtol=RTOL, atol=RTOL)
    np.testing.assert_allclose(b, C_TIMES_SLOPE.sum(0), rtol=RTOL, atol=RTOL)
    np.testing.assert_array_equal(unused, np.zeros_like(UNUSED))


def test_the_shape_of_the_gradient_of_a_table_is_known(computed):
    def f(table):
        def total(primals, tap):
            rows = ops.take(primals[0], ops.convert_to_tensor([1, 1, 2]), axis=0)
            return [ops.sum(rows**2)], ()

        linear = autodiff.vjp(total, [table])
        (gradient,) = linear.pullback([ops.ones(())])
        assert tuple(gradient.shape) == X.shape
        return gradient

    expected = 2 * X * np.array([[0], [2], [1], [0]])
    np.testing.assert_allclose(computed(f, X), expected, rtol=RTOL)


def test_several_pullbacks_from_one_linearisation(computed):
    def f(*primals):
        linear = autodiff.vjp(network, list(primals))
        one, c = ops.ones(()), ops.convert_to_tensor(C)
        taps = linear.pullback_taps([None, c])
        twice = linear.pullback_taps([None, 2.0 * c])
        everything = linear.pullback_all([one, c])
        nothing = linear.pullback_taps([one, None])
        return taps, twice, everything, nothing

    taps, twice, (gradients, all_taps), nothing = computed(f, *POINT)
    np.testing.assert_allclose(taps["s"], C_TIMES_SLOPE, rtol=RTOL, atol=RTOL)
    np.testing.assert_allclose(twice["s"], 2 * C_TIMES_SLOPE, rtol=RTOL, atol=RTOL)
    np.testing.assert_allclose(all_taps["s"], C_TIMES_SLOPE, rtol=RTOL, atol=RTOL)
    np.testing.assert_allclose(
        gradients[0], X.T @ C_TIMES_SLOPE + 2 * W, rtol=RTOL, atol=RTOL
    )
    np.testing.assert_array_equal(gradients[2], np.zeros_like(UNUSED))
    # The first output does not go through the tap.
    np.testing.assert_array_equal(nothing["s"], np.zeros_like(S))


def test_a_tap_that_no_parameter_reaches(computed):
    """A tapped constant, as before a frozen layer, has its gradient all the same."""

    def f(b):
        def constant(primals, tap):
            s = tap("s", ops.convert_to_tensor(S))
            return [ops.tanh(s), primals[0] * 1.0], ()

        linear = autodiff.vjp(constant, [b])
        return linear.pullback_all([ops.convert_to_tensor(C), None])

    gradients, taps = computed(f, B)
    np.testing.assert_allclose(taps["s"], C_TIMES_SLOPE, rtol=RTOL, atol=RTOL)
    np.testing.assert_array_equal(gradients[0], np.zeros_like(B))


def test_an_output_that_is_a_constant(computed):
    def f(b):
        linear = autodiff.vjp(
            lambda primals, tap: ([ops.convert_to_tensor(S), primals[0] * 3.0], ()), [b]
        )
        constant = linear.pullback([ops.convert_to_tensor(C), None])
        return constant, linear.pullback([None, ops.ones_like(b)])

    constant, other = computed(f, B)
    np.testing.assert_array_equal(constant[0], np.zeros_like(B))
    np.testing.assert_allclose(other[0], np.full_like(B, 3.0))


DIRECTIONS = [
    [RNG.normal(size=p.shape).astype("float32") for p in POINT] for _ in range(2)
]


def expected_push(v):
    return [np.sum(2 * W * v[0]), (1 - H**2) * (X @ v[0] + v[1])]


def test_push_of_an_output_that_nothing_reaches_is_zero(computed):
    def f(b, v):
        linear = autodiff.linearize(
            lambda primals, tap: ([ops.convert_to_tensor(S), primals[0] * 2.0], ()),
            [b],
        )
        return list(linear.push([v]))

    constant, other = computed(f, B, B)
    np.testing.assert_array_equal(constant, np.zeros_like(S))
    np.testing.assert_allclose(other, 2 * B, rtol=RTOL)


@pytest.mark.parametrize("taps", [True, False])
def test_linearize_pushes_several_vectors(computed, taps):
    def f(*arrays):
        linear = autodiff.linearize(network, list(arrays[:3]), taps)
        pushed = [list(linear.push(list(arrays[i : i + 3]))) for i in (3, 6)]
        return list(linear.outputs), pushed

    values, pushed = computed(f, *POINT, *DIRECTIONS[0], *DIRECTIONS[1])
    np.testing.assert_allclose(values[1], H, rtol=RTOL, atol=RTOL)
    for ours, v in zip(pushed, DIRECTIONS, strict=True):
        for a, b in zip(ours, expected_push(v), strict=True):
            np.testing.assert_allclose(a, b, rtol=RTOL, atol=RTOL)


def test_push_and_pullback_are_adjoint(computed):
    def f(*arrays):
        primals, tangents = list(arrays[:3]), list(arrays[3:])
        c = [ops.ones(()), ops.convert_to_tensor(C)]
        linear = autodiff.linearize(network, primals)
        pulled, pushed = linear.pullback(c), linear.push(tangents)
        left = sum(ops.sum(a * b) for a, b in zip(pushed, c, strict=True))
        return left, sum(ops.sum(a * b) for a, b in zip(pulled, tangents, strict=True))

    left, right = computed(f, *POINT, *DIRECTIONS[0])
    np.testing.assert_allclose(left, right, rtol=RTOL)


def test_products_in_a_loop_at_one_point(computed):
    """`J^T J` three times over: the point is linearised outside of the loop."""

    def f(*arrays):
        linear = autodiff.linearize(network, list(arrays[:3]))

        def body(i, v):
            return list(linear.pullback(linear.push(v)))

        return ops.fori_loop(0, 3, body, list(arrays[3:]))

    w, b, unused = computed(f, *POINT, *DIRECTIONS[0])
    J = np.zeros((1 + 8, 8))
    for column, one in enumerate(np.eye(8, dtype="float32")):
        dw, db = one[:6].reshape(3, 2), one[6:]
        J[:, column] = np.hstack([c.ravel() for c in expected_push([dw, db])])
    v = np.hstack([a.ravel() for a in DIRECTIONS[0][:2]])
    right = np.linalg.matrix_power(J.T @ J, 3) @ v
    ours = np.hstack([w.ravel(), b.ravel()])
    np.testing.assert_allclose(ours, right, rtol=0, atol=RTOL * np.abs(right).max())
    np.testing.assert_array_equal(unused, np.zeros_like(UNUSED))


def test_a_product_leaves_a_compiled_function():
    """Where `compiled` compiles, products at one point do not repeat the forward."""
    runs = []

    def prepare(point):
        runs.append("forward")
        linear = autodiff.linearize(network, point)
        return autodiff.portable(lambda v: linear.pullback(linear.push(v)), point)

    prepare = autodiff.compiled(prepare)
    multiply = autodiff.compiled(lambda product, v: product(v))
    v = [ops.convert_to_tensor(d) for d in DIRECTIONS[0]]
    for scale in (1.0, 2.0):  # the second point must not see the first one's tensors
        product = prepare([ops.convert_to_tensor(scale * p) for p in POINT])
        with autodiff.stepwise():
            ours = multiply(product, v)
    assert len(runs) == (1 if BACKEND == "jax" else 2)
    h = np.tanh(2 * S)
    slope = 1 - h**2
    dz = slope * (X @ DIRECTIONS[0][0] + DIRECTIONS[0][1])
    right = X.T @ (slope * dz) + 4 * W * np.sum(4 * W * DIRECTIONS[0][0])
    ours = ops.convert_to_numpy(ours[0])
    np.testing.assert_allclose(ours, right, rtol=RTOL, atol=10 * RTOL)


@pytest.mark.parametrize("loop", ["while", "fori", "cond"])
def test_stepwise_loops_run_in_python(loop):
    """Their bodies see numbers, not tracers, so they may read the next batch."""
    seen = []

    def body(i, total):
        seen.append(int(i))
        return total + 1.0

    start = ops.zeros(())
    with autodiff.stepwise():
        if loop == "while":
            _, total = ops.while_loop(
                lambda i, t: i < 3, lambda i, t: (i + 1, body(i, t)), (0, start)
            )
        elif loop == "fori":
            total = ops.fori_loop(0, 3, body, start)
        else:
            total = ops.cond(start < 1, lambda: body(0, start + 2), lambda: start)
    assert seen == ([0] if loop == "cond" else [0, 1, 2])
    assert float(total) == 3.0


def test_hessian_product(computed):
    """`sum(sin(w)) (u . u)`, whose Hessian couples the two parameters."""
    u, v, unused = RNG.normal(size=(3, 2)), RNG.normal(size=4), UNUSED

    def scalar(primals):
        return ops.sum(ops.sin(primals[0])) * ops.sum(primals[1] ** 2)

    def f(*arrays):
        return autodiff.hessian_product(scalar, list(arrays[:3]), list(arrays[3:]))

    du, dv = DIRECTIONS[0][0], RNG.normal(size=4)
    hu, hv, h_unused = computed(f, u, v, unused, du, dv, DIRECTIONS[0][2])
    square, sine = np.sum(v**2), np.sum(np.sin(u))
    along_u, along_v = np.sum(np.cos(u) * du), 2 * np.sum(v * dv)
    right_u = -np.sin(u) * square * du + np.cos(u) * along_v
    right_v = 2 * v * along_u + 2 * sine * dv
    np.testing.assert_allclose(hu, right_u, rtol=RTOL, atol=10 * RTOL)
    np.testing.assert_allclose(hv, right_v, rtol=RTOL, atol=10 * RTOL)
    np.testing.assert_array_equal(h_unused, np.zeros_like(UNUSED))


def test_hessian_through_the_moments_of_a_batch(computed):
    """`sum(variance(x w))`; TensorFlow's own moments would lose a term of it."""

    def scalar(primals):
        _, variance = ops.moments(ops.matmul(ops.convert_to_tensor(X), primals[0]), [0])
        return ops.sum(variance)

    (product,) = computed(
        lambda w, v: autodiff.hessian_product(scalar, [w], [v]), W, DIRECTIONS[0][0]
    )
    centered = X - X.mean(0)
    right = 2 / len(X) * centered.T @ centered @ DIRECTIONS[0][0]
    np.testing.assert_allclose(product, right, rtol=RTOL, atol=RTOL)


@pytest.mark.skipif(BACKEND == "torch", reason="PyTorch traces nothing")
def test_eager_computes_while_a_step_is_traced():
    seen = []

    def f(x):
        total = autodiff.eagerly(lambda: ops.convert_to_numpy(ops.sum(ops.ones((3,)))))
        seen.append(float(total))
        return x

    mode = "jit" if BACKEND == "jax" else "graph"
    MODES[mode](f)(ops.ones(()))
    assert seen == [3.0]


@pytest.mark.parametrize("traced", [False, True])
def test_eager_differentiates(traced):
    """TensorFlow's own scope for this stops every tape: derivatives become zero."""
    seen = []

    def product():
        at = ops.convert_to_tensor(np.float32([1.0, 2.0]))
        cubes = autodiff.hessian_product(
            lambda p: ops.sum(p[0] ** 3), [at], [ops.ones_like(at)]
        )
        return ops.convert_to_numpy(cubes[0])

    def f(x):
        seen.append(autodiff.eagerly(product))
        return x

    if traced and BACKEND != "torch":
        MODES["jit" if BACKEND == "jax" else "graph"](f)(ops.ones(()))
    else:
        f(ops.ones(()))
    np.testing.assert_allclose(seen[0], [6.0, 12.0], rtol=RTOL)


@pytest.mark.skipif(BACKEND != "torch", reason="only PyTorch's tensors hold graphs")
def test_results_hold_no_graph():
    """A result that requires a gradient would keep the batch in memory."""
    linear = autodiff.vjp(network, [ops.convert_to_tensor(p) for p in POINT])
    tensors = [*linear.outputs, linear.aux["s"], *linear.aux["pair"][1]]
    assert not any(t.requires_grad for t in tensors)


def test_inner_products_of_long_vectors_keep_their_digits():
    tenth = ops.full((2**22,), 0.1)
    assert float(autodiff.inner(tenth, tenth)) == pytest.approx(0.01 * 2**22, rel=1e-5)


def test_gradient_of_attention_where_a_query_may_see_no_key():
    """All keys count the same then; PyTorch's fused kernel forgets how many."""
    rng = np.random.default_rng(0)
    q, k, v, w = rng.normal(size=(4, 2, 5, 3, 4)).astype("float32")
    nothing = np.zeros((2, 1, 5, 5), bool)

    def attend(primals, tap):
        output = ops.dot_product_attention(q, k, *primals, mask=nothing)
        return [ops.sum(ops.multiply(w, output))], ()

    linear = autodiff.vjp(attend, [ops.convert_to_tensor(v)])
    (gradient,) = linear.pullback([ops.ones(())])
    expected = np.broadcast_to(w.mean(axis=1, keepdims=True), v.shape)
    np.testing.assert_allclose(ops.convert_to_numpy(gradient), expected, atol=1e-6)
