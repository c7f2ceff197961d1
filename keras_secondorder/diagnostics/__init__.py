"""Curvature one can see: numbers, a page of text and pictures of a trained model."""

from keras_secondorder.diagnostics.layers import (
    Factor,
    Layer,
    gains,
    has_blocks,
    layers,
)
from keras_secondorder.diagnostics.measures import (
    NoiseScale,
    Shares,
    cosine,
    effective_rank,
    noise_scale,
    subspace_share,
)
from keras_secondorder.diagnostics.network import NetworkProbe, Spectrum
from keras_secondorder.diagnostics.report import Report, plot, report

__all__ = [
    "Factor",
    "Layer",
    "NetworkProbe",
    "NoiseScale",
    "Report",
    "Shares",
    "Spectrum",
    "cosine",
    "effective_rank",
    "gains",
    "has_blocks",
    "layers",
    "noise_scale",
    "plot",
    "report",
    "subspace_share",
]
