import os
import pathlib
import re
import tomllib

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

pyproject = pathlib.Path(__file__).parents[1] / "pyproject.toml"

project = "keras_secondorder"
author = "The keras_secondorder authors"
copyright = author
release = tomllib.loads(pyproject.read_text())["project"]["version"]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
]
exclude_patterns = ["_build"]
html_theme = "furo"

myst_enable_extensions = ["amsmath", "dollarmath"]
myst_heading_anchors = 3

# Only our own words: docstrings that are inherited from Keras are left out.
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_typehints = "none"
napoleon_numpy_docstring = False


def fences_to_code_blocks(app, what, name, obj, options, lines):
    """Turns ``` fences, which read well in an editor, into reStructuredText."""
    result, margin = [], None
    for line in lines:
        fence = re.fullmatch(r"(\s*)```(\w*)", line)
        if fence and margin is None:
            margin = fence[1]
            result += ["", f"{margin}.. code-block:: {fence[2] or 'text'}", ""]
        elif fence:
            margin = None
            result.append("")
        else:
            result.append("    " + line if margin is not None and line else line)
    lines[:] = result


def setup(app):
    app.connect("autodoc-process-docstring", fences_to_code_blocks, priority=100)


# The fields of NamedTuples are members already; list them once.
napoleon_use_ivar = True
