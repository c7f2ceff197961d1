"""A penalty's share of the preconditioned gradient, which is kept with the inverses."""

import keras
import numpy as np
import problems
import pytest

import keras_secondorder as kso

RNG = np.random.default_rng(11)
SMALL = RNG.normal(size=(8, 4, 40)).astype("float32")
LARGE = RNG.normal(size=(8, 200, 40)).astype("float32")


def run(l1, l2, batches, **settings):
    """The parameters after each batch, and the optimizer.

    An L1 penalty, however small, sends the whole gradient the direct way.
    """
    penalty = {
        f"{name}_regularizer": keras.regularizers.L1L2(l1, l2)
        for name in ("kernel", "bias")
    }
    layer = problems.dense(40, **penalty)
    model = problems.sequential([layer], inputs=(40,), scale=0.1)
    optimizer = kso.KFAC(fisher="exact", statistics_fraction=1.0, **settings)
    model.compile(optimizer=optimizer, loss="mse")
    path = [problems.parameters(model)]
    for x in batches:
        model.train_on_batch(x, x[:, ::-1].copy())
        path.append(problems.parameters(model))
    return np.array(path), optimizer


def known(optimizer):
    """Whether the share of the penalty is kept."""
    (block,) = optimizer.blocks
    return bool(keras.ops.convert_to_numpy(block.inverses[-1]))


def both(l2, batches, **settings):
    ours, optimizer = run(0.0, l2, batches, **settings)
    direct, other = run(1e-30, l2, batches, **settings)
    assert len(optimizer.blocks[0].inverses) == 5
    assert len(other.blocks[0].inverses) == 2
    return ours, direct, optimizer


def assert_same(ours, direct, rtol):
    steps, right = np.diff(ours, axis=0), np.diff(direct, axis=0)
    for step, other in zip(steps, right, strict=True):
        assert np.linalg.norm(step - other) <= rtol * np.linalg.norm(other)


def test_with_fresh_inverses_nothing_lags():
    ours, direct, optimizer = both(1e-3, SMALL, inverse_every=1)
    assert known(optimizer)
    assert_same(ours, direct, 1e-4)


def test_between_refreshes_a_small_penalty_lags_a_little():
    ours, direct, optimizer = both(1e-3, SMALL)
    assert known(optimizer)
    assert_same(ours, direct, 1e-2)
    assert not np.array_equal(ours, direct)


def test_a_penalty_beside_which_damping_is_small_goes_the_direct_way():
    ours, direct, _ = both(10.0, SMALL)
    assert_same(ours, direct, 1e-4)


@pytest.mark.parametrize("first", ["large", "small"])
def test_batches_of_two_sizes(first):
    """Large batches go the direct way, and keep nothing for small ones after them."""
    batches = [*LARGE[:4], *SMALL[:3]] if first == "large" else [*SMALL[:4], *LARGE[:3]]
    ours, direct, optimizer = both(1e-3, batches)
    assert known(optimizer) == (first == "small")
    assert_same(ours, direct, 1e-4 if first == "large" else 1e-2)


def test_the_plan_counts_what_is_kept():
    _, optimizer = run(0.0, 1e-3, SMALL[:1])
    (plan,), (block,) = optimizer.curvature.plan, optimizer.blocks
    kept = [*block.factors, *block.inverses[:-1]]
    assert plan.bytes == 4 * sum(int(np.prod(v.shape)) for v in kept)
