"""Factors of low rank plus a multiple of the identity, and K-FAC with them."""

import keras
import numpy as np
import problems
import pytest
from keras import ops

import keras_secondorder as kso
from keras_secondorder.capture import plan_blocks
from keras_secondorder.curvature.factor import damped_inverses
from keras_secondorder.curvature.low_rank import LowRank, Subspace, low_ranks

SIZE, RANK = 40, 6
RNG = np.random.default_rng(0)


def tensor(array):
    return ops.convert_to_tensor(np.asarray(array, "float32"))


def numpy(x):
    return ops.convert_to_numpy(x).astype(float)


def matrix(spectrum):
    """A symmetric matrix with these eigenvalues, and its eigenvectors as columns."""
    Q, _ = np.linalg.qr(RNG.normal(size=(len(spectrum), len(spectrum))))
    return (Q * spectrum) @ Q.T, Q


def iterated(M, times, start=None):
    found = LowRank(ops.zeros((len(M), RANK)), None, None)
    if start is not None:
        found = found._replace(basis=start)
    for _ in range(times):
        (found,) = low_ranks([Subspace(tensor(M), found.basis)])
    return found


FALLING = np.concatenate([[50.0, 20, 9, 5, 4, 3], np.linspace(0.2, 0.0, SIZE - RANK)])


def test_dominant_subspace_and_the_mean_of_the_rest():
    M, Q = matrix(FALLING)
    found = iterated(M, 3)
    basis = numpy(found.basis)
    np.testing.assert_allclose(basis.T @ basis, np.eye(RANK), atol=1e-5)
    top = Q[:, :RANK]
    # The angles between both subspaces, from three steps out of nothing.
    cosines = np.linalg.svd(top.T @ basis, compute_uv=False)
    assert cosines.min() > 0.999
    np.testing.assert_allclose(float(found.scale), FALLING[RANK:].mean(), rtol=1e-2)
    within = np.linalg.eigvalsh(numpy(found.within))[::-1]
    np.testing.assert_allclose(within, FALLING[:RANK], rtol=1e-3)
    assert abs(np.trace(numpy(found.to_dense())) - FALLING.sum()) < 1e-3


def test_products_from_both_sides():
    M, _ = matrix(FALLING)
    found = iterated(M, 2)
    dense, V = numpy(found.to_dense()), RNG.normal(size=(SIZE, 3))
    for cuts in ([], [SIZE - 1], [5, 20]):
        blocks = found.left(*map(tensor, np.split(V, cuts)))
        left = np.concatenate([numpy(b) for b in blocks])
        np.testing.assert_allclose(left, dense @ V, atol=1e-4)
    np.testing.assert_allclose(numpy(found.right(tensor(V.T))), V.T @ dense, atol=1e-4)


@pytest.mark.parametrize("damping", [1e-3, 1.0, 100.0])
def test_damped_inverse_is_that_of_the_matrix(damping):
    M, _ = matrix(FALLING)
    found = iterated(M, 2)
    plain, (inverse,) = numpy(found.to_dense()), damped_inverses([found], [damping])
    right = np.linalg.inv(plain + damping * np.eye(SIZE))
    ours = numpy(inverse.to_dense())
    np.testing.assert_allclose(ours, right, rtol=0, atol=2e-4 * np.abs(right).max())
    assert np.linalg.eigvalsh(0.5 * (ours + ours.T)).min() > 0


def test_follows_a_matrix_that_moves():
    M, Q = matrix(FALLING)
    start = iterated(M, 3).basis
    turned = Q.copy()  # the last direction within changes places with one outside
    turned[:, [RANK - 1, RANK + 5]] = Q[:, [RANK + 5, RANK - 1]]
    found = iterated((turned * FALLING) @ turned.T, 3, start)
    cosines = np.linalg.svd(turned[:, :RANK].T @ numpy(found.basis), compute_uv=False)
    assert cosines.min() > 0.99


def test_directions_that_were_zero_are_found_later():
    """Pixels that are 0 in the first batches, and a matrix of zeros before all."""
    late = np.zeros((SIZE, SIZE))
    late[RANK + 4 :, RANK + 4 :] = matrix(FALLING[: SIZE - RANK - 4])[0]
    found = iterated(np.zeros((SIZE, SIZE)), 2)
    assert np.isfinite(numpy(found.to_dense())).all()
    found = iterated(late, 3, found.basis)
    error = np.abs(numpy(found.to_dense()) - late).max()
    assert error < 0.3  # FALLING has its largest value outside at 0.2


def test_rows_of_zeros_stay_out_of_it():
    M = np.zeros((SIZE, SIZE))
    M[8:, 8:] = matrix(FALLING[: SIZE - 8])[0]
    assert np.array_equal(numpy(iterated(M, 2).basis)[:8], np.zeros((8, RANK)))


def test_nan_stays_nan():
    M, _ = matrix(FALLING)
    M[0, 0] = np.nan
    (inverse,) = damped_inverses([iterated(M, 1)], [1.0])
    assert not np.isfinite(numpy(inverse.to_dense())).any()


# --- in the plan ---------------------------------------------------------------------


def wide(units=24, **kwargs):
    return problems.sequential(
        [problems.dense(units, "tanh", **kwargs), problems.dense(3)], inputs=(SIZE - 1,)
    )


def test_large_full_factors_have_a_rank():
    first, last = plan_blocks(wide(), rank=RANK)
    assert (
        first.factors == "A 40 x 40 (inverse of rank 6), G 24 x 24 (inverse of rank 6)"
    )
    assert last.factors == "A 25 x 25 (inverse of rank 6), G 3 x 3"
    first, last = plan_blocks(wide(), rank=RANK + 3)
    assert first.factors == "A 40 x 40 (inverse of rank 9), G 24 x 24"
    assert last.factors == "A 25 x 25, G 3 x 3"
    (first, _) = plan_blocks(wide(), rank=RANK, max_factor_size=30)
    assert first.factors == "A 40 (diagonal), G 24 x 24 (inverse of rank 6)"


@pytest.mark.parametrize("approximation", ["block_tridiagonal", "eigenvalue_corrected"])
def test_forms_that_keep_no_inverses_have_none(approximation, capsys):
    model = wide()
    model.compile(optimizer=kso.KFAC(rank=RANK, approximation=approximation))
    kso.coverage(model)
    assert "rank" not in capsys.readouterr().out


def test_the_plan_counts_what_is_kept():
    model = wide()
    total = sum(block.bytes for block in plan_blocks(model, rank=RANK))
    model.compile(optimizer=kso.KFAC(rank=RANK), loss="mse")
    sizes = [4 * int(np.prod(v.shape)) for v in model.optimizer.variables]
    parameters = 4 * model.count_params()
    assert total + parameters <= sum(sizes) <= total + parameters + 100


# --- in K-FAC ------------------------------------------------------------------------


def data(rows=64):
    rng = np.random.default_rng(1)
    # Inputs with a few large directions, as images have them.
    mix = rng.normal(size=(SIZE - 1, SIZE - 1)) * 2.0 ** -np.arange(SIZE - 1)[:, None]
    x = (rng.normal(size=(rows, SIZE - 1)) @ mix).astype("float32")
    return x, np.tanh(x[:, :3]).astype("float32")


def test_preconditioner_is_that_of_the_truncated_factors():
    """By NumPy: each factor by its dominant eigenvectors and the mean of the rest."""
    x, y = data()
    model = wide(units=8)
    optimizer = kso.KFAC(
        damping=0.1, rank=RANK, fisher="exact", inverse_every=1, statistics_fraction=1.0
    )
    model.compile(optimizer=optimizer, loss="mse")
    for _ in range(30):  # the same batch: the iteration converges
        model.train_on_batch(x, y)
    (block, _) = optimizer.blocks
    A, G = (numpy(v.value) for v in block.factors)
    gamma = float(ops.convert_to_numpy(optimizer.gamma.value))
    pi = np.sqrt((np.trace(A) / len(A)) / (np.trace(G) / len(G)))

    def inverse(factor, damping, rank):
        e, Q = np.linalg.eigh(factor)
        if rank:
            e[:-rank] = e[:-rank].mean()
        return (Q / (e + damping)) @ Q.T

    V = RNG.normal(size=(len(A), len(G)))
    right = inverse(A, pi * gamma, RANK) @ V @ inverse(G, gamma / pi, 0)
    fresh = optimizer.curvature.damped_inverses(tensor(gamma)).values[0]
    ours = block.precondition([tensor(V[:-1]), tensor(V[-1])], fresh, None)
    ours = np.vstack([numpy(ours[0]), numpy(ours[1])[None]])
    np.testing.assert_allclose(ours, right, rtol=0, atol=5e-3 * np.abs(right).max())


@pytest.mark.parametrize("rows", [3, 64])
def test_from_rows_and_from_the_gradient_are_the_same(rows):
    x, y = data(rows)
    updates = []
    for penalty in (None, 1e-12):  # an L1 penalty's gradient has to go the direct way
        regularizer = penalty and keras.regularizers.L1(penalty)
        model = wide(kernel_regularizer=regularizer)
        model.compile(optimizer=kso.KFAC(rank=RANK), loss="mse")
        before = problems.parameters(model)
        model.train_on_batch(x, y)
        updates.append(problems.parameters(model) - before)
    np.testing.assert_allclose(
        updates[0], updates[1], rtol=0, atol=1e-4 * np.abs(updates[0]).max()
    )


def test_trains_as_well_as_with_whole_inverses():
    x, y = data(256)
    losses = {}
    for rank in (None, RANK):
        model = wide()
        model.compile(optimizer=kso.KFAC(rank=rank), loss="mse")
        history = model.fit(x, y, batch_size=64, epochs=15, verbose=0, shuffle=False)
        losses[rank] = history.history["loss"]
        assert history.history["skipped_steps"][-1] == 0
    assert losses[RANK][-1] < 1.3 * losses[None][-1] < 0.1 * losses[None][0]


def test_saved_and_resumed(tmp_path):
    x, y = data()
    model = wide()
    model.compile(optimizer=kso.KFAC(rank=RANK), loss="mse")
    model.fit(x, y, batch_size=32, epochs=2, verbose=0, shuffle=False)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert again.optimizer.rank == RANK
    for m in (model, again):
        m.fit(x, y, batch_size=32, epochs=1, verbose=0, shuffle=False)
    np.testing.assert_allclose(
        problems.parameters(again), problems.parameters(model), rtol=1e-5, atol=1e-6
    )
