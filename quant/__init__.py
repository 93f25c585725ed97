"""Quantization numerics and modules; independent of ranks and clusters."""

from quant.kernels import prepare_kernels
from quant.kv_cache import QuantCache
from quant.linear import ADAPTER_PARAMETERS, SCALE_PARAMETERS, QuantEmbedding, QuantLayer, QuantLinear, weights_changed
from quant.observers import (
    Observer,
    Ranges,
    combine,
    partial_clipped,
    partial_errors,
    partial_fit,
    partial_squares,
    partial_stats,
    recomputing,
    scale_from_histogram,
    scales_from_errors,
    scales_from_stats,
    zero_points_from_stats,
)
from quant.prepare import prepare
from quant.quantization import Quantization, ScaleGroup
from quant.rules import DEFAULT_EXEMPT, Rule, exempt_line
from quant.scale import Quantizer, Scale
from quant.spec import PRESETS, SCHEMES, Preset, Scheme, TensorSpec, get_scheme

__all__ = [
    "ADAPTER_PARAMETERS",
    "DEFAULT_EXEMPT",
    "PRESETS",
    "SCALE_PARAMETERS",
    "SCHEMES",
    "Observer",
    "Preset",
    "QuantCache",
    "QuantEmbedding",
    "QuantLayer",
    "QuantLinear",
    "Quantization",
    "Quantizer",
    "Ranges",
    "Rule",
    "Scale",
    "ScaleGroup",
    "Scheme",
    "TensorSpec",
    "combine",
    "exempt_line",
    "get_scheme",
    "partial_clipped",
    "partial_errors",
    "partial_fit",
    "partial_squares",
    "partial_stats",
    "prepare",
    "prepare_kernels",
    "recomputing",
    "scale_from_histogram",
    "scales_from_errors",
    "scales_from_stats",
    "weights_changed",
    "zero_points_from_stats",
]
