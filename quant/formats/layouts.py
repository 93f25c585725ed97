"""Checkpoint layouts for export, one Linear at a time.

- ``compressed``: compressed-tensors (``compressed_tensors.py``), for transformers, vLLM and SGLang.
- ``vllm_fp8``: the same codes and scales under vLLM's own ``fp8`` configuration, for fp8 with one scale per weight (and
  per input, or per token), or blocks of 128 x 128 (``weight_scale_inv`` as in DeepSeek-V3; transformers reads it, too).
- ``gpt_oss``: experts in MXFP4 as gpt-oss is published, with one tensor of codes (``_blocks``) and one of scales
  (``_scales``) for all experts of a layer.
- ``modelopt``: ModelOpt's tensors and configuration (``modelopt.py``), for fp8, NVFP4, and MXFP4 with fp8 inputs.
- ``dequantized``: fake-quantized weights in the model's dtype, for every reader of plain checkpoints, which will not
  quantize inputs.
- ``gguf``: llama.cpp's blocks (``gguf.py``), for weights of 4 or 8 bits in groups of 32, and NVFP4; ``model/save/``
  writes them into one file.
- ``mlx``: for mlx-lm (``mlx.py``), integers in groups of 32, 64 or 128, MXFP4 and MXFP8.
- ``executorch``: torchao's tensors (``torchao.py``), which ExecuTorch lowers to XNNPACK, for ``8da4w``.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, get_args

import torch

from quant.formats.compressed_tensors import (
    Shapes,
    TrainedLinear,
    dequantized_weight,
    export_format,
    pack_linear,
    packed_shapes,
    unpack_weight,
    unpack_zero,
)
from quant.formats.config_groups import ignore_patterns, quantization_config
from quant.formats.gguf import block_type, gguf_shapes, gguf_tensors
from quant.formats.mlx import mlx_shapes, mlx_tensors, quantization_mode
from quant.formats.modelopt import algorithm, modelopt_config, modelopt_shapes, modelopt_tensors
from quant.formats.torchao import check_intx, intx_shapes, intx_tensors, torchao_config
from quant.spec import FP8_TENSOR, SCHEMES, Scheme, TensorSpec

Layout = Literal["compressed", "vllm_fp8", "gpt_oss", "modelopt", "dequantized", "gguf", "mlx", "executorch"]

# Suffixes for a stack of experts, by the suffix of compressed-tensors' MXFP4.
BLOCK_ENDS = {"weight_packed": "_blocks", "weight_scale": "_scales"}

# Schemes of layouts that have one for all quantized layers. gpt_oss has no format of inputs; a server leaves them
# unquantized or uses MXFP8.
_ONE_SCHEME = {
    "vllm_fp8": (
        *(SCHEMES["fp8_static"], SCHEMES["fp8_block"]),
        Scheme("fp8 with dynamic inputs", FP8_TENSOR, SCHEMES["fp8_dynamic"].activations),
    ),
    "gpt_oss": (SCHEMES["mxfp4"], SCHEMES["mxfp4_mxfp8"]),
}
# Raise ValueError for a scheme that a layout does not support.
_CHECKS: dict[str, Callable[[Scheme], object]] = {
    "gguf": block_type,
    "mlx": quantization_mode,
    "executorch": check_intx,
    "modelopt": algorithm,
}
# As gpt-oss is published, with only its experts quantized.
_NO_EXPERTS = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


def check_layout(layout: str, schemes: Iterable[Scheme]) -> None:
    """Check that a model with layers of these schemes can be written in this layout. Raises ValueError if the layout is
    unknown, does not support one of the schemes, or can hold only one scheme and there are several."""
    if layout not in get_args(Layout):
        raise ValueError(f"unknown layout {layout!r}; known: {', '.join(get_args(Layout))}")
    schemes = list(schemes)
    for scheme in schemes:
        export_format(scheme)
    for scheme in schemes:
        _CHECKS.get(layout, export_format)(scheme)
    found = {(scheme.weights, scheme.activations): scheme.name for scheme in schemes}
    known = _ONE_SCHEME.get(layout, ())
    if known and list(found) not in [[(scheme.weights, scheme.activations)] for scheme in known]:
        raise ValueError(
            f"layout {layout!r} holds {' or '.join(scheme.name for scheme in known)} for all quantized layers, got "
            f"{', '.join(found.values()) or 'none'}; use layout 'compressed'"
        )


def block_shapes(key: str, experts: int, in_features: int, out_features: int) -> Shapes:
    """Return dtypes and shapes of the tensors for a stack of experts in layout ``gpt_oss``, by name on disk. ``key`` is
    the stack's name in transformers."""
    groups = in_features // 32
    return {
        f"{key}_blocks": (torch.uint8, (experts, out_features, groups, 16)),
        f"{key}_scales": (torch.uint8, (experts, out_features, groups)),
    }


def linear_shapes(layout: Layout, in_features: int, out_features: int, scheme: Scheme, dtype: torch.dtype) -> Shapes:
    """Return dtypes and shapes of the tensors for one Linear's weight and scales on disk, by suffix; ``dtype`` is the
    model's. Raises ValueError for a scheme or sizes that the layout does not support."""
    if layout == "dequantized":
        return {"weight": (dtype, (out_features, in_features))}
    if layout == "gguf":
        return gguf_shapes(in_features, out_features, scheme)
    if layout == "mlx":
        return mlx_shapes(in_features, out_features, scheme, dtype)
    if layout == "executorch":
        return intx_shapes(in_features, out_features, scheme, dtype)
    shapes = packed_shapes(in_features, out_features, scheme, dtype)
    if layout == "modelopt":
        return modelopt_shapes(shapes, scheme)
    return {_suffix(layout, scheme, suffix): expected for suffix, expected in shapes.items()}


@torch.no_grad()
def linear_tensors(
    layout: Layout, linear: TrainedLinear, source: Mapping[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """Build the tensors of one Linear on disk by suffix, in CPU memory, from the result of
    :func:`quant.formats.compressed_tensors.pack_linear`. Raises ValueError as that function does, or if the layout
    cannot store a scale. For ``source`` see :func:`quant.formats.modelopt.modelopt_tensors`."""
    packed, scheme, scale = pack_linear(linear), linear.scheme, linear.scale
    if layout == "modelopt":
        return modelopt_tensors(packed, scheme, source)
    if layout not in ("dequantized", "gguf", "mlx", "executorch"):
        return {_suffix(layout, scheme, suffix): tensor for suffix, tensor in packed.items()}
    zero, bias = unpack_zero(packed, scheme), {"bias": packed["bias"]} if "bias" in packed else {}
    if layout == "mlx":
        return mlx_tensors(packed, scale.s0, zero, scheme, linear.dtype) | bias
    codes = unpack_weight(packed, scheme)
    if layout == "executorch":
        return intx_tensors(linear.name, codes, scale, linear.dtype) | bias
    if layout == "gguf":
        return gguf_tensors(f"{linear.name}.weight_scale", codes, scale.s0, packed, scheme) | bias
    return {"weight": dequantized_weight(codes, scale.s0.cpu(), scheme.weights, linear.dtype, zero)} | bias


def _suffix(layout: Layout, scheme: Scheme, suffix: str) -> str:
    block = layout == "vllm_fp8" and scheme.weights.granularity == "block"
    return "weight_scale_inv" if block and suffix == "weight_scale" else suffix


def layout_config(
    layout: Layout,
    layers: Mapping[str, Scheme],
    skipped: Iterable[str],
    routers: Iterable[str],
    kv_cache: TensorSpec | None = None,
    no_linears: Iterable[str] = (),
    embedding: Scheme | None = None,
    copied: Iterable[str] = (),
    anywhere: bool = False,
) -> dict[str, Any] | None:
    """Build the ``quantization_config`` of config.json; None for the layouts dequantized, gguf and mlx. Errors: see
    :func:`quant.formats.config_groups.quantization_config` and :func:`quant.formats.modelopt.modelopt_config`.

    For the other arguments see :func:`quant.formats.config_groups.quantization_config` and
    :func:`quant.formats.config_groups.ignore_patterns`. ``copied`` are names on disk of unquantized modules that are
    copied and not part of the model, such as a vision tower; for ``vllm_fp8`` the names of their Linears.
    """
    if layout in ("dequantized", "gguf", "mlx"):
        return None
    if layout == "compressed":
        ignore = ignore_patterns(skipped, layers, routers, copied, anywhere=anywhere)
        return quantization_config(
            layers, ignore, kv_cache, no_linears=no_linears, embedding=embedding, anywhere=anywhere
        )
    if layout == "gpt_oss":
        return {"modules_to_not_convert": list(_NO_EXPERTS), "quant_method": "mxfp4"}
    if layout == "executorch":
        return torchao_config(layers, skipped, no_linears)
    if layout == "modelopt":
        return modelopt_config(layers, [*routers, *skipped, *(f"{name}*" for name in copied)], kv_cache)
    scheme = next(iter(layers.values()))
    config: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    if scheme.stored_input is not None:
        config["activation_scheme"] = "static"
    if scheme.weights.granularity == "block":
        config["weight_block_size"] = [scheme.weights.group_size, scheme.weights.group_size]
    # Full names only: vLLM supports no patterns here.
    return config | {"ignored_layers": list(dict.fromkeys([*routers, *skipped, *copied]))}
