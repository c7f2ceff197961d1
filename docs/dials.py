"""Makes the pictures of reading_the_dials.md, from real runs on scikit-learn's digits.

    python docs/dials.py

Each run shows one thing. They take a few seconds on PyTorch, more where steps compile.
"""

import functools
import pathlib

import keras
import numpy as np
from sklearn.datasets import load_digits

import keras_secondorder as kso
from keras_secondorder.diagnostics.pictures import new_figure

FOLDER = pathlib.Path(__file__).parent / "pictures"
EVERY = 2


def run(optimizer, epochs=12, batch_size=250):
    """Trains 64-60-10 on the digits, and returns what the monitor saw."""
    x, y = load_digits(return_X_y=True)
    x, y = (x[:1500] / 16).astype("float32"), y[:1500]
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(60, activation="tanh", name="hidden"),
            keras.layers.Dense(10, name="logits"),
        ]
    )
    model.compile(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    monitor = kso.callbacks.CurvatureMonitor(
        step_every=EVERY, layers_every=EVERY, network_every=0, max_overhead=None
    )
    losses = []

    class Losses(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            losses.append(logs["loss"])

        def on_epoch_end(self, epoch, logs=None):
            self.model.reset_metrics()

    model.fit(
        x,
        y,
        batch_size=batch_size,
        epochs=epochs,
        callbacks=[monitor, Losses()],
        verbose=0,
    )
    frame = monitor.frame()
    columns = frame if isinstance(frame, dict) else frame.reset_index().to_dict("list")
    columns["loss"] = [losses[step - 1] for step in columns["step"]]
    return columns


PANELS = {
    "loss": ("loss of the epoch so far", "log"),
    "Step/damping": ("damping: lambda", "log"),
    "Step/rho": ("rho", "linear"),
    "Layers/hidden/A_condition": ("condition of hidden's A", "log"),
}


def draw(name, runs):
    """Draws the same four dials for some runs."""
    figure = new_figure(9.0, 5.2)
    panels = figure.subplots(2, 2).ravel()
    figure.subplots_adjust(0.08, 0.09, 0.98, 0.94, hspace=0.38, wspace=0.2)
    for panel, (tag, (title, scale)) in zip(panels, PANELS.items(), strict=True):
        for label, columns in runs.items():
            steps, values = np.array(columns["step"]), np.array(columns[tag], float)
            known = np.isfinite(values)
            panel.plot(steps[known], values[known], label=label, linewidth=1.3)
        panel.set_title(title, fontsize=10)
        panel.set_yscale(scale)
        low, high = panel.get_ylim()
        if tag == "Step/rho":
            panel.axhline(1.0, color="0.6", linewidth=0.8)
            panel.set_ylim(min(low, 0.0), max(high, 2.0))
        elif high < 10 * low:  # two ticks at least
            panel.set_ylim(low / 3.2, high * 3.2)
        panel.set_xlabel("step", fontsize=8)
        panel.tick_params(labelsize=8)
    if len(runs) > 1:
        panels[0].legend(fontsize=8)
    figure.savefig(FOLDER / f"{name}.png", dpi=72)
    for label, columns in runs.items():
        shown = {t: f"{np.nanmean(np.array(columns[t])[-20:]):.3g}" for t in PANELS}
        print(name, label, shown)


def main():
    """Makes all pictures."""
    FOLDER.mkdir(exist_ok=True)
    rule = functools.partial(kso.AdaptiveDamping, gamma_every=None)
    healthy = run(kso.KFAC())
    draw("healthy", {"KFAC()": healthy})
    draw(
        "collapsing_lambda",
        {
            "KFAC()": healthy,
            "minimum=0": run(kso.KFAC(damping=rule(0.2, relative=True))),
        },
    )
    draw(
        "rho",
        {
            "KFAC()": healthy,
            "no bounds, learning_rate=1": run(
                kso.KFAC(1.0, norm_constraint=None, relative_step=None)
            ),
        },
    )
    draw(
        "condition",
        {
            "KFAC()": healthy,
            "lambda from 1e-4": run(kso.KFAC(damping=rule(1e-4))),
        },
    )


if __name__ == "__main__":
    main()
