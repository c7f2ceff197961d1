"""Pictures of curvature, with matplotlib."""

import io

import numpy as np

from keras_secondorder.curvature import Density

PIXELS = 128  # sides of larger matrices are averaged down to this
MISSING = (
    "Pictures are drawn by matplotlib. The package was not found. "
    "Run `pip install matplotlib`, or ask for numbers only."
)


def has_matplotlib() -> bool:
    """Whether pictures can be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def new_figure(width: float, height: float):
    """A figure that no window manager knows of.

    Args:
        width: Inches.
        height: Inches.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(MISSING) from error
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    return figure


def png(figure, dpi: int = 80) -> tuple[bytes, tuple]:
    """A figure as `(PNG, (width, height) in pixels)`."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    width, height = (figure.get_size_inches() * dpi).astype(int)
    return buffer.getvalue(), (int(width), int(height))


def factors_figure(layer):
    """Heat maps of a layer's factors and of their inverses, with colour scales.

    The values are absolute, as in Martens' figures, on a logarithmic scale over three
    decades. Larger matrices are averaged over squares.

    Args:
        layer: A `diagnostics.Layer`.

    References:
        Martens (2016), thesis, figures 6.1 to 6.5.
    """
    factors = [f for f in layer.factors if f.matrix.ndim == 2][:2]
    columns = max(1, len(factors))
    # Small, with large letters: TensorBoard shows it at half of its size.
    figure = new_figure(3.2 * columns, 5.8)
    panels = figure.subplots(2, columns, squeeze=False)
    figure.subplots_adjust(0.08, 0.05, 0.89, 0.88, wspace=0.4, hspace=0.2)
    for column, factor in enumerate(factors):
        inverse = factor.inverse
        if inverse is not None and inverse.shape != factor.matrix.shape:
            inverse = None
        for row, matrix in enumerate((factor.matrix, inverse)):
            name = factor.name if row == 0 else f"inverse of damped {factor.name}"
            _heat_map(figure, panels[row, column], matrix, name)
    for row in range(2):
        for column in range(len(factors), columns):
            panels[row, column].set_axis_off()
    figure.suptitle(f"{layer.name}: |entries|", fontsize=13)
    return figure


def density_figure(density: Density):
    """The density of eigenvalues, on a logarithmic scale.

    Args:
        density: What `spectral_density` returns.
    """
    figure = new_figure(6.4, 4.0)
    figure.subplots_adjust(0.12, 0.13, 0.97, 0.96)
    draw_density(figure.subplots(), density)
    return figure


def draw_density(panel, density: Density) -> None:
    """Draw a spectral density into axes of matplotlib."""
    top = density.density.max()
    panel.semilogy(density.grid, np.maximum(density.density, 1e-7 * top))
    panel.set_ylim(1e-6 * top, 3 * top)
    panel.axvline(0.0, color="0.6", linewidth=0.8)
    panel.set_xlabel("eigenvalue of the Hessian")
    panel.set_ylabel("density")


def reduced(matrix) -> np.ndarray:
    """Absolute values, averaged over squares to at most 128 rows and columns."""
    matrix = np.abs(matrix)
    for axis in (0, 1):
        step = -(-matrix.shape[axis] // PIXELS)
        starts = np.arange(0, matrix.shape[axis], step)
        sums = np.add.reduceat(matrix, starts, axis=axis)
        counts = np.diff([*starts, matrix.shape[axis]])
        matrix = sums / np.expand_dims(counts, 1 - axis)
    return matrix


def _heat_map(figure, panel, matrix, name):
    panel.set_title(name, fontsize=12)
    if matrix is None or not np.isfinite(matrix).all() or not np.any(matrix):
        panel.text(0.5, 0.5, "none yet", ha="center", va="center")
        panel.set_axis_off()
        return
    size, values = matrix.shape[-1], reduced(matrix)
    top = values.max()
    # Drawn as the logarithm: a logarithmic colour scale takes several times as long.
    low, high = np.log10(1e-3 * top), np.log10(top)
    picture = panel.imshow(
        np.log10(np.maximum(values, 1e-3 * top)),
        vmin=low,
        vmax=high,
        cmap="magma",
        extent=(0, size, size, 0),
        interpolation="nearest",
    )
    ticks = np.arange(np.ceil(low), np.floor(high) + 1)
    bar = figure.colorbar(picture, ax=panel, shrink=0.85, ticks=ticks)
    bar.set_ticklabels([f"{10.0**t:g}" for t in ticks], fontsize=11)
    panel.set_xticks([0, size])
    panel.set_yticks([0, size])
    panel.tick_params(labelsize=11)
