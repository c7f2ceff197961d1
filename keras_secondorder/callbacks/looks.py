"""What a monitor sees in one look, group by group."""

import numpy as np
from keras import ops

from keras_secondorder.callbacks.cards import card, describe
from keras_secondorder.callbacks.records import Records
from keras_secondorder.capture import Coverage, plan_blocks
from keras_secondorder.diagnostics import NetworkProbe, gains, has_blocks, layers
from keras_secondorder.diagnostics.pictures import density_figure, factors_figure, png
from keras_secondorder.optimizers.step_report import CAUSES, read


class Looks:
    """Looks at a model between two steps, and keeps what it sees in the records.

    On JAX, the variables of the model and its optimizer must be in sync.

    Args:
        model: The model.
        optimizer: Its optimizer, without the one that scales the loss around it.
        batch: `(x, y, sample_weight)`, or None: nothing of the network then.
        records: Where the numbers go.
        top: Number of eigenvalues.
        seed: Seed of random vectors.
        pictures: Whether to draw.
        training: Whether the network is looked at in training mode.
    """

    def __init__(
        self, model, optimizer, batch, records: Records, top, seed, pictures, training
    ):
        self._model, self._optimizer, self._batch = model, optimizer, batch
        self._records, self._top, self._seed = records, top, seed
        self._training = training
        self._pictures = pictures and records.file is not None
        self._probe, self._next_picture = None, 0

    @property
    def probe(self) -> NetworkProbe:
        """The operators of the network, made when they are first used."""
        if self._probe is None:
            options = {"top": self._top, "seed": self._seed, "training": self._training}
            self._probe = NetworkProbe(self._model, *self._batch, **options)
        return self._probe

    def texts(self, step: int, groups) -> None:
        """The cards of some groups, the coverage table and the memory plan."""
        file = self._records.file
        for group in groups:
            file.text(f"{group}/how_to_read", step, card(group))
        plan = plan_blocks(self._model)
        if has_blocks(self._optimizer):
            plan = self._optimizer.curvature.plan
        table, memory = str(Coverage(plan)).rsplit("\n", 1)
        file.text("Text/coverage", step, _as_code(table))
        file.text("Text/memory_plan", step, _as_code(memory))

    def step(self, step: int) -> None:
        """What the last step said of itself; the logs of `fit` have the rest."""
        optimizer = self._optimizer
        skips = ops.convert_to_numpy(optimizer.skips)
        values = {
            **read(optimizer),
            **{f"skipped_for_{c}": n for c, n in zip(CAUSES, skips, strict=True)},
        }
        if has_blocks(optimizer):
            failed = optimizer.curvature.failed
            values["failed_inverses"] = ops.convert_to_numpy(failed)
        self._put(step, {f"Step/{name}": value for name, value in values.items()})

    def layers(self, step: int) -> None:
        """The spectra of all factors."""
        values, file = {}, self._records.file
        for layer in layers(self._optimizer, inverses=False):
            if layer.pi is not None:
                values[f"Layers/{layer.name}/pi"] = layer.pi
            for factor in layer.factors:
                start = f"Layers/{layer.name}/{factor.name}_"
                for name, value in factor.scalars().items():
                    values[start + name] = value
                e = factor.eigenvalues
                e = e[e > 1e-12 * max(e.max(), 0.0)]
                if file is not None and e.size:
                    tag = f"{start}spectrum"
                    file.histogram(tag, step, np.log10(e), describe(tag))
        self._put(step, values)

    def picture(self, step: int) -> None:
        """A picture of the factors of one layer, the next one at each call."""
        plan = self._optimizer.curvature.plan
        numbers = [i for i, block in enumerate(plan) if block.kind == "kronecker"]
        if not numbers:
            return
        number = numbers[self._next_picture % len(numbers)]
        self._next_picture += 1
        for layer in layers(self._optimizer, number):
            tag = f"Layers/{layer.name}/factors"
            picture = png(factors_figure(layer))
            self._records.file.image(tag, step, *picture, describe(tag))

    def hessian(self, step: int) -> None:
        """Outer eigenvalues and trace, and the gradient in their space."""
        spectrum, share = self.probe.hessian()
        values = _numbered("hessian_eigenvalue", spectrum.top)
        values["Network/hessian_trace"] = spectrum.trace
        values["Network/gradient_in_top_subspace"] = share
        self._put(step, values)

    def gauss_newton(self, step: int) -> None:
        """Largest eigenvalues and trace."""
        spectrum = self.probe.gauss_newton()
        values = _numbered("gauss_newton_eigenvalue", spectrum.top)
        self._put(step, {**values, "Network/gauss_newton_trace": spectrum.trace})

    def density(self, step: int) -> None:
        """The spectral density of the Hessian, a picture."""
        if self._pictures:
            tag, picture = "Network/density", png(density_figure(self.probe.density()))
            self._records.file.image(tag, step, *picture, describe(tag))

    def noise(self, step: int) -> None:
        """The noise of the gradient, and what preconditioning does to it."""
        noise = self.probe.noise()
        values = {
            "Network/gradient_square": noise.gradient_square,
            "Network/gradient_variance": noise.variance,
        }
        if noise.scale is not None:
            values["Network/noise_scale"] = noise.scale
        if has_blocks(self._optimizer):
            found = gains(self._optimizer, self.probe.gradient())
            values.update({f"Layers/{name}/gain": g for name, g in found.items()})
        self._put(step, values)

    def errors(self, step: int) -> None:
        """How good the Kronecker approximation is."""
        errors = self.probe.approximation_errors(self._optimizer)
        self._put(step, {f"Network/kronecker_error_{n}": e for n, e in errors.items()})

    def _put(self, step, values):
        self._records.scalars(step, values)


def _numbered(name, values) -> dict:
    return {f"Network/{name}_{i}": value for i, value in enumerate(values, 1)}


def _as_code(text) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
