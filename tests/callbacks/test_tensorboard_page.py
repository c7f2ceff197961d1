"""TensorBoard itself, on loopback, shows the monitor's run to a browser.

`TENSORBOARD_SCREENSHOTS=folder` keeps what the browser shows, for people to look at;
`TENSORBOARD_LOGS=folder` shows other runs than the small one made here.
"""

import os
import pathlib
import shutil
import socket
import subprocess
import sys
import time
import urllib.request

import keras
import numpy as np
import pytest

from keras_secondorder.callbacks.cards import card, describe
from keras_secondorder.callbacks.event_file import EventFile
from keras_secondorder.callbacks.records import Records
from keras_secondorder.diagnostics import Factor, Layer
from keras_secondorder.diagnostics.pictures import factors_figure, png

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def write_run(folder):
    """A run as the monitor writes it, without any training."""
    file = EventFile(folder / "kfac" / "curvature")
    records = Records(file)
    rng = np.random.default_rng(0)
    for step in range(0, 100, 10):
        values = {"Step/damping": 0.9**step, "Layers/hidden/pi": 1.0 + step}
        records.scalars(step, {**values, "Network/hessian_trace": 5.0})
        file.histogram("Layers/hidden/A_spectrum", step, rng.normal(size=50))
    A = np.eye(30) + 0.1
    factor = Factor("A", np.linalg.eigvalsh(A), np.ones(30), A, np.linalg.inv(A))
    picture = png(factors_figure(Layer("hidden", "kronecker", [factor, factor], 1.0)))
    tag = "Layers/hidden/factors"
    file.image(tag, 0, *picture, describe(tag))
    file.text("Step/how_to_read", 0, card("Step"))
    file.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """`show(tab)`, what the browser has of a tab after some seconds, and `tags`."""
    if keras.config.backend() != "torch":
        pytest.skip("nothing here depends on the backend: it runs on torch")
    pytest.importorskip("tensorboard")
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed")
    folder = tmp_path_factory.mktemp("board")
    logs = pathlib.Path(os.environ.get("TENSORBOARD_LOGS", folder / "logs"))
    if not logs.exists():
        write_run(logs)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    host, port = address.split(":")
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", logs]
    command += ["--host", host, "--port", port, "--load_fast=false"]
    server = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )

    def show(tab):
        options = ["--headless=new", "--no-sandbox", "--disable-gpu"]
        options += ["--disable-dev-shm-usage", f"--user-data-dir={folder / 'profile'}"]
        options += ["--window-size=1500,1200", "--virtual-time-budget=20000"]
        screenshots = os.environ.get("TENSORBOARD_SCREENSHOTS")
        url = f"http://{address}/?darkMode=false#{tab}"
        if screenshots:
            target = pathlib.Path(screenshots).resolve() / f"{tab}.png"
            subprocess.run(
                [browser, *options, f"--screenshot={target}", url],
                capture_output=True,
                timeout=120,
            )
        run = subprocess.run(
            [browser, *options, "--dump-dom", url],
            capture_output=True,
            text=True,
            timeout=120,
        )
        return run.stdout

    def tags(plugin):
        with urllib.request.urlopen(f"http://{address}/data/plugin/{plugin}/tags") as a:
            return a.read().decode()

    try:
        wait_for_runs(address, server)
        yield show, tags
    finally:
        server.terminate()
        server.wait(20)


def wait_for_runs(address, server, seconds=90):
    """TensorBoard answers before it has read the files."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert server.poll() is None, "TensorBoard has ended"
        try:
            with urllib.request.urlopen(f"http://{address}/data/runs") as answer:
                if b"curvature" in answer.read():
                    return
        except OSError:
            pass
        time.sleep(0.5)
    raise AssertionError(f"TensorBoard shows no run after {seconds} seconds")


@pytest.mark.slow
def test_a_browser_sees_the_run(page):
    show, tags = page
    shown = show("timeseries")
    for word in ("kfac/curvature", "Layers", "Network", "Step", "cards"):
        assert word in shown, word
    # The other tabs are frames of their own, whose content the page does not have.
    expected = {
        "images": "Layers/hidden/factors",
        "histograms": "Layers/hidden/A_spectrum",
        "text": "Step/how_to_read",
    }
    if "TENSORBOARD_SCREENSHOTS" in os.environ:
        for tab in expected:
            show(tab)
    if "TENSORBOARD_LOGS" in os.environ:
        return  # their layers may have other names
    for tab, tag in expected.items():
        assert tag in tags(tab), tab
