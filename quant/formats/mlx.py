"""Codes and scales of one Linear in MLX's modes of quantization (``mlx.core.dequantize``).

- ``affine``, integers: a weight is ``scales * q + biases``, with ``q = code + 2^(bits-1)`` from 0 to 2^bits - 1,
  packed without gaps into little-endian 32-bit words: the same bytes as compressed-tensors' ``weight_packed``.
  ``biases`` are ``-2^(bits-1) * scales``, which is exact, as the factor is a power of two. With zero points, biases are
  ``-(2^(bits-1) + zero) * scales``, which the model's dtype may not represent. Scales and biases of such layers are
  fp32, and MLX then computes in fp32.
- ``mxfp4`` and ``mxfp8``: the bytes of compressed-tensors' codes as 32-bit words, and its exponent bytes as ``scales``,
  uint8.
"""

from typing import Any

import torch

from quant.formats.compressed_tensors import Shapes, packed_shapes
from quant.spec import SCHEMES, Scheme

GROUP_SIZES = (32, 64, 128)
_BITS = (2, 3, 4, 5, 6, 8)  # of MLX's kernels for affine


def quantization_mode(scheme: Scheme) -> dict[str, Any]:
    """Return ``group_size``, ``bits`` and ``mode`` of MLX for ``scheme``. Raises ValueError if MLX cannot store it
    exactly; the message names the nearest supported scheme."""
    weights = scheme.weights
    size = weights.group_size
    if scheme.activations is None and weights.mx:
        return {"group_size": size, "bits": weights.bits, "mode": f"mxfp{weights.bits}"}
    integers = weights.dtype == "int" and not weights.ggml and weights.bits in _BITS and size in GROUP_SIZES
    if scheme.activations is None and integers:
        return {"group_size": size, "bits": weights.bits, "mode": "affine"}
    bits = weights.bits if weights.dtype == "int" and weights.bits <= 4 else 8
    names = (f"w{bits}a16_g{size if size in GROUP_SIZES else 128}", f"w{bits}a16_g128")
    nearest = "mxfp4" if weights.dtype == "fp4_e2m1" else next(name for name in names if name in SCHEMES)
    raise ValueError(
        "layout 'mlx' holds integers of 2 to 6 and 8 bits in groups of 32, 64 or 128 with scales in model.dtype, MXFP4 "
        f"and MXFP8, whose inputs are not quantized, got {scheme.name}; the nearest is {nearest}"
    )


def mlx_shapes(in_features: int, out_features: int, scheme: Scheme, dtype: torch.dtype) -> Shapes:
    """Return dtypes and shapes of a Linear's tensors by suffix; ``dtype`` is the model's."""
    kept, groups = packed_shapes(in_features, out_features, scheme, dtype)["weight_scale"]
    weight = (torch.uint32, (out_features, in_features * scheme.weights.bits // 32))
    if scheme.weights.mx:
        return {"weight": weight, "scales": (kept, groups)}
    kept = torch.float32 if scheme.weights.has_zero_points else dtype
    return {"weight": weight, "scales": (kept, groups), "biases": (kept, groups)}


def mlx_tensors(
    packed: dict[str, torch.Tensor],
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    scheme: Scheme,
    dtype: torch.dtype,
) -> dict[str, torch.Tensor]:
    """Build the tensors of a Linear by suffix, in CPU memory. ``packed`` has its tensors in compressed-tensors' layout.
    ``scale`` is the effective scale of the forward, ``[out, groups]``, for integers exact in the model's ``dtype``.
    ``zero`` has the fp32 zero points ``[out, groups]``, or is None."""
    codes = packed["weight" if "weight" in packed else "weight_packed"]
    weight = codes.cpu().contiguous().view(torch.uint32)
    if scheme.weights.mx:
        return {"weight": weight, "scales": packed["weight_scale"]}
    scale = scale.cpu().float()
    offset = 2.0 ** (scheme.weights.bits - 1) + (0 if zero is None else zero)
    kept = dtype if zero is None else torch.float32
    return {"weight": weight, "scales": scale.to(kept), "biases": (-offset * scale).to(kept)}


def mlx_config(layers: dict[str, Scheme]) -> dict[str, Any]:
    """Build mlx-lm's ``quantization`` of config.json: the most common mode, group size and bits, and an entry for each
    layer that differs."""
    kinds = {name: quantization_mode(scheme) for name, scheme in layers.items()}
    found = list(kinds.values())
    usual = max(found, key=found.count)
    return {**usual, **{name: kind for name, kind in kinds.items() if kind != usual}}
