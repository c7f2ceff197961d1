"""A page of text, and a page of pictures, about the curvature of a trained model."""

import warnings
from typing import NamedTuple

import keras
import numpy as np

from keras_secondorder.arguments import check_count, check_kind, check_rows
from keras_secondorder.curvature import Density
from keras_secondorder.diagnostics.layers import gains, has_blocks, layers
from keras_secondorder.diagnostics.measures import NoiseScale, Shares
from keras_secondorder.diagnostics.network import NetworkProbe, Spectrum
from keras_secondorder.diagnostics.pictures import draw_density, new_figure


class Report(NamedTuple):
    """What `report` found; it prints as a page of text.

    Attributes:
        name: Name of the model.
        parameters: Number of trainable parameters.
        rows: Number of examples that were used.
        training: Whether layers were in training mode.
        hessian: `Spectrum` of the Hessian.
        gauss_newton: `Spectrum` of the Gauss-Newton matrix.
        gradient_share: Share of the squared gradient in the space of the Hessian's top
            eigenvectors.
        noise: `NoiseScale` of the gradient.
        density: `Density` of the eigenvalues of the Hessian.
        shares: `Shares` of these that stand out from zero.
        layers: A `Layer` for each block; empty without `KFAC`.
        gains: `|U| / |V|` by layer; empty without `KFAC`.
        errors: Relative errors of the Kronecker approximation; empty without `KFAC`.
    """

    name: str
    parameters: int
    rows: int
    training: bool
    hessian: Spectrum
    gauss_newton: Spectrum
    gradient_share: float
    noise: NoiseScale
    density: Density
    shares: Shares
    layers: list
    gains: dict
    errors: dict

    def __str__(self):
        scale, square = self.noise.scale, self.noise.gradient_square
        length = f"{square**0.5:.3g} without noise" if square > 0 else "lost in noise"
        lines = [
            f"Curvature of '{self.name}': {self.parameters:,} parameters, "
            f"{self.rows} examples, "
            f"{'training' if self.training else 'evaluation'} mode",
            "",
            f"{'':<14}{'trace':>10}  largest eigenvalues",
        ]
        for name, spectrum in (
            ("Hessian", self.hessian),
            ("Gauss-Newton", self.gauss_newton),
        ):
            top = "".join(f"{value:>10.3g}" for value in spectrum.top)
            lines.append(f"{name:<14}{spectrum.trace:>10.3g}{top}")
        positive, negative, exact = self.shares
        lines += [
            f"eigenvalues of the Hessian: {'' if exact else 'about '}{positive:.0%} "
            f"above 1% of the largest, {negative:.0%} as far below zero",
            "",
            f"gradient: length {length}, "
            f"{self.gradient_share:.0%} of its square in the Hessian's top subspace",
            "gradient noise scale: "
            + (f"{scale:.3g} examples" if scale else "beyond what this batch shows"),
        ]
        if self.layers:
            lines += ["", *self._table()]
            lines.append("(docs/reading_the_dials.md says how to read the columns)")
        if self.errors:
            found = ", ".join(f"{e:+.0%} ({n})" for n, e in self.errors.items())
            lines += ["", f"Kronecker approximation of v^T F v is off by {found}"]
        return "\n".join(lines)

    def _table(self):
        width = max(len("layer"), *(len(layer.name) for layer in self.layers)) + 2
        yield (
            f"{'layer':<{width}}{'factor':<8}{'size':>6}{'trace':>10}{'rank':>8}"
            f"{'condition':>11}{'damping':>9}{'gain':>10}"
        )
        for layer in self.layers:
            for i, factor in enumerate(layer.factors):
                gain = self.gains.get(layer.name)
                shown = f"{gain:>10.3g}" if i == 0 and gain is not None else ""
                damped = f"{'-':>11}{'-':>9}"  # it is their product that is damped
                if factor.damping is not None:
                    damped = f"{factor.condition:>11.3g}{factor.damping_share:>9.0%}"
                yield (
                    f"{layer.name if i == 0 else '':<{width}}{factor.name:<8}"
                    f"{factor.eigenvalues.size:>6}{factor.trace:>10.3g}"
                    f"{factor.effective_rank:>8.1f}{damped}{shown}"
                )


def report(
    model,
    x,
    y=None,
    sample_weight=None,
    rows: int = 256,
    top: int = 5,
    seed: int = 0,
    training: bool = False,
) -> Report:
    """Print a page about the curvature of a trained model.

    Args:
        model: A compiled and built Keras model, with any optimizer.
        x: Inputs, arrays.
        y: Targets, arrays.
        sample_weight: Weights of the examples, or None.
        rows: Most examples that are used, the first ones.
        top: Number of eigenvalues.
        seed: Seed of random vectors.
        training: Whether layers are in training mode, as they are in a step; batch
            normalisation then uses the statistics of these examples.

    Returns:
        A `Report` with all numbers.

    Raises:
        ValueError: The model is not compiled or not built, there are fewer than two
            examples or the arrays differ in their number, `rows` is below 2, or `top`
            below 1.

    Example:
        >>> import keras, numpy as np, keras_secondorder as kso
        >>> model = keras.Sequential(
        ...     [keras.Input((4,), name="in"), keras.layers.Dense(1)], name="line"
        ... )
        >>> model.compile(optimizer="adam", loss="mse")
        >>> x = np.random.default_rng(0).normal(size=(64, 4))
        >>> found = kso.diagnostics.report(model, x, x[:, :1], top=2)
        Curvature of 'line': 5 parameters, 64 examples, evaluation mode
        ...
        >>> len(found.hessian.top)
        2
    """
    check_kind("model", model, keras.Model, "a Keras model")
    check_count("rows", rows, 2)
    check_count("top", top)
    check_rows("(x, y, sample_weight)", (x, y, sample_weight))
    x, y, sample_weight = keras.tree.map_structure(
        lambda t: None if t is None else t[:rows], (x, y, sample_weight)
    )
    probe = NetworkProbe(
        model, x, y, sample_weight, top=top, seed=seed, training=training
    )
    hessian, share = probe.hessian()
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    blocks = optimizer is not None and has_blocks(optimizer)
    if blocks and not int(keras.ops.convert_to_numpy(optimizer.iterations)):
        blocks = False
        warnings.warn(
            f"{type(optimizer).__name__} has taken no step yet, so that it has no "
            "factors to show. Train first; the network's curvature is shown as it is.",
            stacklevel=2,
        )
    density = probe.density(samples=2)
    found = Report(
        name=model.name,
        parameters=sum(int(np.prod(v.shape)) for v in model.trainable_variables),
        rows=len(keras.tree.flatten(x)[0]),
        training=training,
        hessian=hessian,
        gauss_newton=probe.gauss_newton(),
        gradient_share=share,
        noise=probe.noise(),
        density=density,
        shares=probe.shares(density),
        layers=layers(optimizer) if blocks else [],
        gains=gains(optimizer, probe.gradient()) if blocks else {},
        errors=probe.approximation_errors(optimizer) if blocks else {},
    )
    print(found)
    return found


def plot(found: Report, path=None):
    """Draw a report: density, eigenvalues, and the spectra of all factors.

    Args:
        found: What `report` returned.
        path: File to save the picture in, or None.

    Returns:
        A matplotlib `Figure`.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: `found` is no `Report`.
    """
    check_kind("found", found, Report, "what `report` returned")
    figure = new_figure(11.0, 3.8 if not found.layers else 7.4)
    panels = figure.subplots(2 if found.layers else 1, 2, squeeze=False)
    edges = (0.09, 0.93) if found.layers else (0.15, 0.88)
    figure.subplots_adjust(0.07, edges[0], 0.98, edges[1], hspace=0.25)
    draw_density(panels[0, 0], found.density)
    top = panels[0, 1]
    for name, spectrum in (
        ("Hessian", found.hessian),
        ("Gauss-Newton", found.gauss_newton),
    ):
        top.plot(np.arange(1, len(spectrum.top) + 1), spectrum.top, "o-", label=name)
    top.set_xticks(np.arange(1, len(found.hessian.top) + 1))
    top.set_xlabel("number")
    top.set_ylabel("eigenvalue")
    top.legend()
    for i, panel in enumerate(panels[1] if found.layers else ()):
        for layer in found.layers:
            if i < len(layer.factors) and layer.kind == "kronecker":
                e = layer.factors[i].eigenvalues[::-1]
                number = np.arange(1, e.size + 1)
                shown = e > 1e-9 * max(e[0], 1e-30)
                panel.loglog(number[shown], e[shown], label=layer.name)
        panel.set_xlabel("number")
        panel.set_ylabel(f"eigenvalue of {'AG'[i]}")
        if panel.lines:
            panel.legend()
    figure.suptitle(f"Curvature of '{found.name}'")
    if path is not None:
        figure.savefig(path, dpi=80)
    return figure
