"""The pages about layers say what is true: their table, and their example."""

import ast
import importlib.util
import inspect
import pathlib
import re

import keras
import numpy as np
import pytest

import keras_secondorder as kso
from keras_secondorder.callbacks.cards import STEP
from keras_secondorder.capture import plan_blocks
from keras_secondorder.capture.wrapper import _WRAPPERS

DOCS = pathlib.Path(__file__).resolve().parents[1] / "docs"


@pytest.fixture(scope="module")
def layer_table():
    path = DOCS / "layer_table.py"
    spec = importlib.util.spec_from_file_location("layer_table", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def rows(layer_table):
    return layer_table.table()


def test_layer_table_is_up_to_date_and_complete(layer_table, rows):
    page = (DOCS / "layers.md").read_text()
    table = layer_table.markdown(rows)
    assert table in page, "Print it again with `python docs/layer_table.py`."
    # None is lost on the way to the table: what has no row creates no weights, or
    # only some that are not trainable, or those of a function of another library.
    names = {name for name, *_ in rows}
    left_out = {
        name
        for name, cls in layer_table.classes().items()
        if name not in names and creates_weights(cls)
    }
    assert left_out == {"Normalization", "FlaxLayer", "JaxLayer", "TFSMLayer"}


def creates_weights(cls):
    """Whether the code of a layer, apart from `Layer` itself, adds weights."""
    layer = keras.layers.Layer
    own = [c for c in cls.__mro__ if issubclass(c, layer) and c is not layer]
    return any("add_weight" in inspect.getsource(c) for c in own)


def test_error_is_raised_for_exactly_the_fallbacks(layer_table, rows):
    for name, block, _ in rows:
        model = layer_table.example(layer_table.classes()[name])
        try:
            plan_blocks(model, on_unsupported="error")
            raised = False
        except ValueError:
            raised = True
        assert raised == ("fallback" in block), name


def test_worked_example_of_a_wrapper(capsys):
    """The code blocks of extending.md, one after the other, and what they print."""
    page = (DOCS / "extending.md").read_text()
    names = {}
    known = dict(_WRAPPERS)
    try:
        for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
            exec(compile(code, "extending.md", "exec"), names)
    finally:
        _WRAPPERS.clear()
        _WRAPPERS.update(known)
    printed = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    assert capsys.readouterr().out.split() == printed[0].split()


def test_wrong_wrapper_fails_the_check():
    class Half(keras.layers.Dense):
        def call(self, inputs):
            return super().call(inputs)

    known = dict(_WRAPPERS)
    right = _WRAPPERS[keras.layers.Dense]
    wrongs = {
        "a\\^T g": {"input_rows": lambda self, x: 0.5 * right.input_rows(self, x)},
        "undone|from_matrix": {"from_matrix": lambda self, W: [W[1:], W[0]]},
        "say": {"d_in": 4},
    }
    try:
        for message, methods in wrongs.items():
            kso.register_layer_wrapper(Half)(type("Wrong", (right,), methods))
            x = np.random.default_rng(0).normal(size=(2, 4)).astype("float32")
            with pytest.raises(AssertionError, match=message):
                kso.testing.check_layer_wrapper(Half(3), x)
    finally:
        _WRAPPERS.clear()
        _WRAPPERS.update(known)


def test_the_page_has_the_meaning_of_each_dial():
    spec = importlib.util.spec_from_file_location("dials", DOCS / "dial_table.py")
    dials = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(dials)
    page = (DOCS / "reading_the_dials.md").read_text()
    assert dials.tables() in page, "Print it again with `python docs/dial_table.py`."


def test_all_numbers_of_a_step_are_in_the_table_of_the_dials():
    """Every key of a dictionary named `logs` in the code of the optimizers."""
    found = set()
    for path in pathlib.Path(kso.optimizers.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Assign):
                continue
            (target,) = node.targets
            if getattr(target, "id", "") == "logs" and isinstance(node.value, ast.Dict):
                found |= {key.value for key in node.value.keys if key is not None}
            if (
                isinstance(target, ast.Subscript)
                and ast.unparse(target.value) == "logs"
            ):
                found.add(target.slice.value)
    assert {"damping", "rho", "bfgs_status", "velocity"} <= found
    assert found <= {*STEP}
    spec = importlib.util.spec_from_file_location("dials", DOCS / "dial_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = (DOCS / "reading_the_dials.md").read_text()
    assert module.tables() in page, "Print it again with `python docs/dial_table.py`."
