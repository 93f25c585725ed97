"""Codes and scales of one layer as torchao tensors, which ExecuTorch lowers to XNNPACK without requantization.

A weight is an ``IntxUnpackedToInt8Tensor`` (torchao 0.18, ``quantize_/workflows/intx``): ``qdata`` int8 [out, in] with
one code per byte at any width; ``scale`` and ``zero_point`` (0), one per row or group. A safetensors file stores it as
three tensors, described by text in the file's metadata (``torchao.prototype.safetensors``). For a Linear, the text also
describes how the inputs are quantized.

XNNPACK's operators take int8 inputs with a scale and a zero point per token, as in ``8da4w``, and weights of 4 bits per
row or in groups of a multiple of 32, or of 8 bits per row. Group scales are kept in bf16 and must be positive normal
numbers. Embeddings have codes of 4 or 8 bits and no input quantization.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from quant.formats.compressed_tensors import Shapes
from quant.scale import Scale
from quant.spec import SCHEMES, Scheme

# Metadata key, in every file, of the tensors' names in the state dict.
TENSOR_NAMES = "tensor_names"

_INPUTS = SCHEMES["8da4w"].activations
_SMALLEST = torch.finfo(torch.bfloat16).smallest_normal


def check_intx(scheme: Scheme) -> None:
    """Raise ValueError if ExecuTorch has no operator for ``scheme``; the message names an alternative."""
    weights = scheme.weights
    size = weights.group_size or 0
    integers = weights.dtype == "int" and weights.symmetric and weights.granularity in ("channel", "group")
    integers = integers and weights.scale_format == "model"  # i.e. bf16
    groups = integers and size % 32 == 0
    if scheme.activations is None and integers and weights.bits in (4, 8):
        return
    if scheme.activations == _INPUTS and groups and (weights.bits == 4 or (weights.bits == 8 and not size)):
        return
    raise ValueError(
        "layout 'executorch' holds Linears whose inputs are int8 per token and asymmetric, with weights of 4 bits per "
        "row or in groups of a multiple of 32, or of 8 bits per row, and embeddings of 4 or 8 bits, got "
        f"{scheme.name}; the nearest is {'w8a16_channel' if scheme.activations is None else '8da4w'}"
    )


def check_intx_of(name: str, scheme: Scheme, *, embedding: bool) -> None:
    """Raise ValueError if ``name`` is a Linear (``embedding`` is False) and ``scheme`` does not quantize its inputs:
    ExecuTorch supports such schemes for embeddings only."""
    if embedding or scheme.activations is not None:
        return  # embeddings have no schemes with inputs
    raise ValueError(
        f"{name}: layout 'executorch' has no Linear whose inputs are not quantized, got {scheme.name}, which is for "
        "embeddings there: give it 8da4w in quant.rules, or leave it unquantized (lm_head: quant.lm_head null)"
    )


def intx_shapes(in_features: int, out_features: int, scheme: Scheme, dtype: torch.dtype) -> Shapes:
    """Return dtypes and shapes of a layer's tensors by suffix; ``dtype`` is the model's."""
    groups = scheme.weights.scale_shape((out_features, in_features))
    return {
        "_weight_qdata": (torch.int8, (out_features, in_features)),
        "_weight_scale": (dtype, groups),
        "_weight_zero_point": (torch.int8, groups),
    }


def intx_tensors(name: str, codes: torch.Tensor, scale: Scale, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Build the tensors of a layer by suffix, in CPU memory, from its int8 codes [out, in] and its scale, whose s0 is
    the effective scale of the forward, exact in the model's ``dtype``. Raises ValueError, with the layer's ``name``, if
    a scale is not a positive normal bf16 number."""
    stored = scale.s0.cpu().to(dtype)
    if not bool((stored >= _SMALLEST).all()):
        raise ValueError(
            f"{name}: a weight scale is {stored.min().item():.3g}, and XNNPACK takes no scales below {_SMALLEST:.3g}: "
            "export an earlier checkpoint, or leave this layer unquantized"
        )
    return {
        "_weight_qdata": codes,
        "_weight_scale": stored,
        "_weight_zero_point": torch.zeros(stored.shape, dtype=torch.int8),
    }


def intx_metadata(scheme: Scheme, in_features: int, dtype: torch.dtype) -> str:
    """Return the text that describes a quantized weight with ``in_features`` columns in a file's metadata; ``dtype`` is
    the model's. The text of an unquantized tensor is :data:`PLAIN`."""
    weights = scheme.weights
    return json.dumps(
        {
            "_type": "IntxUnpackedToInt8Tensor",
            "_data": {
                "target_dtype": _dtype(f"int{weights.bits}"),
                "block_size": [1, weights.group_size or in_features],
                "dtype": _dtype(str(dtype).removeprefix("torch.")),
                "activation_quantization": None if scheme.activations is None else "int8_asym_per_token",
            },
            "_tensor_data_names": ["qdata", "scale", "zero_point"],
        }
    )


PLAIN = json.dumps({"_type": "Tensor"})


def torchao_config(layers: Mapping[str, Scheme], skipped: Iterable[str], embeddings: Iterable[str]) -> dict[str, Any]:
    """Build transformers' ``quantization_config`` for torchao, from the schemes of the quantized layers by module name,
    the names of the unquantized Linears (``skipped``), and the names in ``layers`` of embeddings."""
    kinds = {name: _config(scheme) for name, scheme in layers.items()}
    return {
        "quant_method": "torchao",
        "quant_type": {"default": {"_type": "FqnToConfig", "_version": 1, "_data": {"fqn_to_config": kinds}}},
        "modules_to_not_convert": sorted(skipped),
        "include_input_output_embeddings": bool(list(embeddings)),
        "untie_embedding_weights": False,
    }


def _config(scheme: Scheme) -> dict[str, Any]:
    """Build torchao's config of one layer, as JSON; keys that are left out mean torchao's defaults."""
    weights = scheme.weights
    granularity: dict[str, Any] = {"_type": "PerAxis", "_version": 1, "_data": {"axis": 0}}
    if weights.group_size is not None:
        granularity = {"_type": "PerGroup", "_version": 1, "_data": {"group_size": weights.group_size}}
    if scheme.activations is None:
        kind, before = "IntxWeightOnlyConfig", ""
    else:
        kind, before = "Int8DynamicActivationIntxWeightConfig", "weight_"
    data = {"weight_dtype": _dtype(f"int{weights.bits}"), f"{before}granularity": granularity}
    return {"_type": kind, "_version": 2, "_data": data}


def _dtype(name: str) -> dict[str, str]:
    return {"_type": "torch.dtype", "_data": name}
