"""README says what is true: its example runs, and its commands exist."""

import os
import pathlib
import re
import shlex
import subprocess
import sys
import tomllib

import keras
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
# The numbers in README are JAX's. Each backend draws its own initial weights: Adam's
# accuracy on the 297 test images was 0.848, 0.832 and 0.818 on the three of them.
ACCURACY_TOLERANCE = 0.05


def blocks(language):
    return re.findall(rf"(?ms)^```{language}\n(.*?)^```", README)


def commands():
    return [line for block in blocks("bash") for line in block.splitlines() if line]


def printed(text):
    found = re.findall(r"(?m)^(\w+): test loss ([\d.]+), test accuracy ([\d.]+)$", text)
    return {name: (float(loss), float(accuracy)) for name, loss, accuracy in found}


def test_length():
    assert len(README.splitlines()) <= 100


def test_example_prints_what_readme_says():
    (source,) = blocks("python")
    # In a process of its own, as a reader runs it: names and seeds start afresh.
    environment = os.environ | {"KERAS_BACKEND": keras.config.backend()}
    run = subprocess.run(
        [sys.executable, "-c", source],
        capture_output=True,
        check=True,
        env=environment,
        text=True,
    )
    result = printed(run.stdout)
    assert set(result) == {"kfac", "adam"}
    assert result["kfac"][1] >= 0.85
    (stated,) = blocks("text")
    for name, (_, accuracy) in printed(stated).items():
        assert abs(result[name][1] - accuracy) <= ACCURACY_TOLERANCE, name


def test_numbers_are_filled_in():
    assert "<<" not in README


def test_links_lead_to_files():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if not target.startswith("http"):
            assert (ROOT / target).is_file(), target


@pytest.mark.parametrize("command", commands())
def test_command_exists(command):
    program, *arguments = shlex.split(command, comments=True)
    if program == "./run":
        assert os.access(ROOT / "run", os.X_OK)
        jobs = re.findall(r"(?m)^  (\w+)\)$", (ROOT / "run").read_text())
        assert arguments[0] in jobs
    elif program == "pip":
        extras = re.search(r"\[(.*)\]", arguments[-1]).group(1).split(",")
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        assert set(extras) <= set(project["optional-dependencies"])
    else:
        assert program == "python", f"{command}: no test for it"
        script, *options = arguments
        environment = os.environ | {"KERAS_BACKEND": keras.config.backend()}
        result = subprocess.run(
            [sys.executable, ROOT / script, "--help"],
            capture_output=True,
            check=True,
            env=environment,
            text=True,
        )
        for option in options:
            if option.startswith("--"):
                assert option in result.stdout, f"{script} has no {option}"
