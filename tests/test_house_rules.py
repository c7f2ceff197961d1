"""The rules that keep the project readable, checked on its source."""

import ast
import inspect
import pathlib
import re
import subprocess
import tomllib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "keras_secondorder"
MAX_LINES = 400

# From the lowest to the highest. A module may import from its own room and from the
# rooms before it; `training` stands before `optimizers` only through LATE, below.
ROOMS = (
    "initializers",
    "autodiff",
    "vectors",
    "solvers",
    "arguments",
    "likelihoods",
    "capture",
    "layers",
    "objective",
    "chunks",
    "curvature",
    "optimizers",
    "training",
    "diagnostics",
    "callbacks",
    "testing",
    "tuning",
)
# Imports against the order that are allowed inside a function: the room that asks, and
# the room it asks for. An optimizer's base class attaches the model it is given.
LATE = {("optimizers", "training")}
BACKENDS = {"jax", "jaxlib", "tensorflow", "torch"}


def python_files():
    folders = ("keras_secondorder", "tests", "examples", "benchmarks", "docs")
    return [
        path
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "_build" not in path.parts
    ]


def package_files():
    return [path for path in python_files() if PACKAGE in path.parents]


def label(path):
    return path.relative_to(ROOT).as_posix()


def imports(path):
    """Lists what a file imports: (dotted name, line, whether inside a function)."""
    found = []

    def visit(node, late):
        if isinstance(node, ast.Import):
            found.extend((alias.name, node.lineno, late) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                package = path.relative_to(ROOT).parts[: -node.level]
                module = ".".join((*package, *filter(None, [module])))
            found.extend(
                (f"{module}.{alias.name}", node.lineno, late) for alias in node.names
            )
        inside = late or isinstance(
            node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
        )
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    visit(ast.parse(path.read_text()), False)
    return found


def test_imports_are_read_in_every_form(tmp_path, monkeypatch):
    module = tmp_path / "keras_secondorder" / "capture" / "dense.py"
    module.parent.mkdir(parents=True)
    module.write_text(
        "import jax.numpy as jnp\n"
        "from keras_secondorder import vectors\n"
        "from . import registry\n"
        "from ..curvature.factors import x\n"
        "def f():\n    from torch import nn\n"
    )
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    assert imports(module) == [
        ("jax.numpy", 1, False),
        ("keras_secondorder.vectors", 2, False),
        ("keras_secondorder.capture.registry", 3, False),
        ("keras_secondorder.curvature.factors.x", 4, False),
        ("torch.nn", 6, True),
    ]


@pytest.mark.parametrize("path", python_files(), ids=label)
def test_keras_is_used_through_its_public_interface(path):
    private = "keras." + "src"
    for name, line, _ in imports(path):
        assert not f"{name}.".startswith(f"{private}."), f"{label(path)}:{line}"
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            assert ast.unparse(node) != private, f"{label(path)}:{node.lineno}"


@pytest.mark.parametrize("path", package_files(), ids=label)
def test_only_autodiff_imports_a_backend(path):
    if path.parent == PACKAGE / "autodiff":
        return
    for name, line, _ in imports(path):
        assert name.split(".")[0] not in BACKENDS, f"{label(path)}:{line}: {name}"


@pytest.mark.parametrize("path", package_files(), ids=label)
def test_a_module_imports_only_from_the_rooms_before_its_own(path):
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if own == "__init__":  # the package's own names come from every room
        return
    assert own in ROOMS, f"{label(path)} is in no room: add it to ROOMS, in its place."
    for name, line, late in imports(path):
        parts = name.split(".")
        if parts[0] != PACKAGE.name:
            continue
        where = f"{label(path)}:{line}: {name}"
        room = parts[1] if len(parts) > 1 else "keras_secondorder"
        assert room in ROOMS, f"{where}: import from a room, not from the package"
        if late and (own, room) in LATE:
            continue
        assert ROOMS.index(room) <= ROOMS.index(own), f"{where}: {room} comes later"


@pytest.mark.parametrize("path", python_files(), ids=label)
def test_files_are_short(path):
    lines = len(path.read_text().splitlines())
    assert lines <= MAX_LINES, f"{label(path)} has {lines} lines: split what it does."


def test_public_names_are_documented():
    import keras_secondorder

    assert keras_secondorder.__doc__
    for name in keras_secondorder.__all__:
        value = getattr(keras_secondorder, name)
        if isinstance(value, str):
            continue
        # A class without a docstring would show its base class's in `help`.
        own = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
        assert (own or "").strip(), f"{name}: no docstring"


def arguments(function):
    """Lists the names a function takes, without self, cls, *args and **kwargs."""
    names = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
    return [name.arg for name in names if name.arg not in ("self", "cls")]


def returns_a_value(function):
    annotation = function.returns
    return annotation is not None and ast.unparse(annotation) != "None"


def missing_sections(node):
    """Lists the docstring sections that a public class or function lacks."""
    docstring = inspect.cleandoc(ast.get_docstring(node) or "")
    wanted = []
    if isinstance(node, ast.ClassDef):
        constructors = [
            child
            for child in node.body
            if isinstance(child, ast.FunctionDef) and child.name == "__init__"
        ]
        if any(arguments(constructor) for constructor in constructors):
            wanted.append("Args:")
    else:
        wanted += ["Args:"] * bool(arguments(node))
        wanted += ["Returns:"] * returns_a_value(node)
    if not docstring:
        return ["a docstring"]
    return [name for name in wanted if not re.search(rf"(?m)^{name}$", docstring)]


def algorithm_files():
    rooms = (PACKAGE / "solvers", PACKAGE / "optimizers")
    return [path for path in package_files() if path.parent in rooms]


@pytest.mark.parametrize("path", algorithm_files(), ids=label)
def test_algorithms_document_what_they_take_and_return(path):
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            if not node.name.startswith("_"):
                missing = missing_sections(node)
                assert not missing, f"{label(path)}:{node.lineno}: {node.name}"


def project_files():
    """Lists the files of the project, without those that git ignores."""
    try:
        listing = subprocess.run(
            ["git", "ls-files", "-co", "--exclude-standard", "-z"],
            cwd=ROOT,
            capture_output=True,
            check=True,
            text=True,
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return python_files()
    return [ROOT / name for name in listing.split("\0") if name]


def test_no_file_names_a_folder_of_one_machine():
    folder = re.compile(r"(?<![\w.~/-])/(?:work|root|home|Users)\b")
    found = []
    for path in project_files():
        if not path.is_file():
            continue
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if folder.search(line):
                found.append(f"{label(path)}:{number}: {line.strip()}")
    assert not found, "\n".join(found)


def test_the_version_is_stated_once():
    import keras_secondorder

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    stated = getattr(keras_secondorder, "__version__", project["version"])
    assert stated == project["version"]
