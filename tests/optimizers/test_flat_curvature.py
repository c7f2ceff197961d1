"""Objectives without curvature, and large batches."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_secondorder as kso
from keras_secondorder.objective import Objective

X = np.random.default_rng(0).normal(size=(32, 3)).astype("float32")


def test_krylov_subspace_descent_goes_down_where_the_gauss_newton_matrix_is_zero():
    model = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
    model.compile(kso.KrylovSubspaceDescent(basis_size=3, bfgs_iterations=5), "mae")
    history = model.fit(X, X[:, :1] + 1, batch_size=32, epochs=4, verbose=0).history
    assert history["loss"][-1] < 0.9 * history["loss"][0]


def test_the_log_of_a_solve_is_finite_at_the_optimum():
    model = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
    model.set_weights([np.zeros((3, 1)), np.zeros(1)])
    model.compile(kso.NaturalGradient(), "mse")
    logs = model.train_on_batch(X, np.zeros((32, 1)), return_dict=True)
    assert float(logs["solver_residual"]) == 0


def test_a_part_of_a_large_batch_is_spread_over_it():
    model = keras.Sequential([keras.Input((1,)), layers.Dense(1)])
    model.compile(loss="mse")
    total = 400_000  # the products of its row numbers go beyond 32 bits
    x = np.arange(total, dtype="float32")[:, None]
    part = Objective(model, ops.convert_to_tensor(x), None, None).part(0.25)
    rows = ops.convert_to_numpy(part._x)[:, 0]
    np.testing.assert_array_equal(rows, 4.0 * np.arange(total // 4))


def test_rows_of_an_automatic_fraction():
    """A quarter, of no fewer than 64 and no more than 128, and never more than all."""
    model = keras.Sequential([keras.Input((1,)), layers.Dense(1)])
    model.compile(loss="mse")
    for total, count in ((50, None), (100, 64), (400, 100), (1000, 128)):
        x = ops.convert_to_tensor(np.zeros((total, 1), "float32"))
        objective = Objective(model, x, None, None)
        _, rows, _ = objective.subset("auto", [])
        assert (rows is None) if count is None else len(rows) == count
        assert objective.whole_batch("auto") == (count is None)


@pytest.mark.parametrize(
    "positions, total, count",
    [(4, 16, None), (4, 20, 16), (4, 100, 25), (32, 8, None), (32, 24, 8)],
)
def test_each_position_of_an_output_is_a_row(positions, total, count):
    model = keras.Sequential([keras.Input((positions, 2)), layers.Dense(3)])
    model.compile(loss="mse")
    x = ops.convert_to_tensor(np.zeros((total, positions, 2), "float32"))
    _, rows, _ = Objective(model, x, None, None).subset("auto", [])
    assert (rows is None) if count is None else len(rows) == count
