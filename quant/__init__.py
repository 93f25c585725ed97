"""Quantisation numerics and modules; knows tensors, not clusters."""

from quant.calibrate import (
    combine,
    needs_search,
    partial_clipped,
    partial_errors,
    partial_squares,
    partial_stats,
    scales_from_errors,
    scales_from_stats,
)
from quant.kernels import prepare_kernels
from quant.linear import SCALE_PARAMETERS, QuantLinear, weights_changed
from quant.observe import Observer
from quant.prepare import Quantization, ScaleGroup, prepare
from quant.rules import DEFAULT_EXEMPT, Rule
from quant.spec import PRESETS, SCHEMES, Preset, Scheme, TensorSpec, get_preset, get_scheme

__all__ = [
    "DEFAULT_EXEMPT",
    "PRESETS",
    "SCALE_PARAMETERS",
    "SCHEMES",
    "Observer",
    "Preset",
    "QuantLinear",
    "Quantization",
    "Rule",
    "ScaleGroup",
    "Scheme",
    "TensorSpec",
    "combine",
    "get_preset",
    "get_scheme",
    "needs_search",
    "partial_clipped",
    "partial_errors",
    "partial_squares",
    "partial_stats",
    "prepare",
    "prepare_kernels",
    "scales_from_errors",
    "scales_from_stats",
    "weights_changed",
]
