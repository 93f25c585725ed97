"""Numerics and modules of quantization, for one process: no collectives, no DeepSpeed."""

from quant.attention import QuantCache
from quant.kernels import prepare_kernels
from quant.linear import SCALE_PARAMETERS, QuantEmbedding, QuantLayer, QuantLinear, weights_changed
from quant.observers import Ranges
from quant.quantization import Quantization, ScaleGroup, replace_layers
from quant.rules import DEFAULT_EXEMPT, Rule
from quant.scale import Quantizer, Scale
from quant.spec import PRESETS, SCHEMES, Preset, Scheme, TensorSpec, get_scheme

__all__ = [
    "DEFAULT_EXEMPT",
    "PRESETS",
    "SCALE_PARAMETERS",
    "SCHEMES",
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
    "get_scheme",
    "prepare_kernels",
    "replace_layers",
    "weights_changed",
]
