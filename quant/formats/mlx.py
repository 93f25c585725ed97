"""Codes and scales of one Linear in MLX's affine groups (``mlx.core.dequantize`` with mode "affine").

A weight is ``scales * q + biases``, with ``q = code + 2^(bits-1)`` from 0 to 2^bits - 1, packed without gaps into
little-endian 32-bit words: the same bytes as compressed-tensors' ``weight_packed``. ``biases`` are ``-2^(bits-1) *
scales``, which is exact, as the factor is a power of two.

With zero points, biases are ``-(2^(bits-1) + zero) * scales``, which the model's dtype may not represent. Scales and
biases of such layers are fp32, and MLX then computes in fp32.
"""

import torch

from quant.formats.compressed_tensors import Shapes
from quant.formats.packing import packed_columns
from quant.spec import SCHEMES, Scheme

GROUP_SIZES = (32, 64, 128)


def check_affine(scheme: Scheme) -> None:
    """Raise ValueError if MLX's affine groups cannot store ``scheme`` exactly; the message names the nearest supported
    scheme."""
    weights = scheme.weights
    plain = weights.dtype == "int" and scheme.activations is None and not weights.ggml
    if plain and weights.group_size in GROUP_SIZES:
        return
    bits = weights.bits if weights.dtype == "int" else 4 if weights.bits == 4 else 8
    size = weights.group_size if weights.group_size in GROUP_SIZES else 128
    nearest = next(name for name in (f"w{bits}a16_g{size}", f"w{bits}a16_g128") if name in SCHEMES)
    raise ValueError(
        "layout 'mlx' holds integers in groups of 32, 64 or 128 with scales in model.dtype, whose inputs are not "
        f"quantized, got {scheme.name}; the nearest is {nearest}"
    )


def affine_shapes(in_features: int, out_features: int, scheme: Scheme, dtype: torch.dtype) -> Shapes:
    """Return dtypes and shapes of a Linear's tensors by suffix; ``dtype`` is the model's."""
    size = scheme.weights.group_size
    assert size is not None
    kept = torch.float32 if scheme.weights.has_zero_points else dtype
    groups = (out_features, in_features // size)
    return {
        "weight": (torch.uint32, (out_features, packed_columns(in_features, scheme.weights.bits))),
        "scales": (kept, groups),
        "biases": (kept, groups),
    }


def affine_tensors(
    packed: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, scheme: Scheme, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Build the tensors of a Linear by suffix, in CPU memory.

    Args:
        packed: ``weight_packed`` of compressed-tensors.
        scale: effective scale of the forward, ``[out, groups]``, exact in ``dtype``.
        zero: fp32 zero points ``[out, groups]``, or None.
        scheme: scheme of the Linear.
        dtype: dtype of the model.
    """
    scale = scale.cpu().float()
    offset = 2.0 ** (scheme.weights.bits - 1) + (0 if zero is None else zero)
    kept = dtype if zero is None else torch.float32
    return {
        "weight": packed.cpu().contiguous().view(torch.uint32),
        "scales": scale.to(kept),
        "biases": (-offset * scale).to(kept),
    }


def affine_config(layers: dict[str, Scheme]) -> dict[str, object]:
    """Build mlx-lm's ``quantization`` of config.json: the most common group size and bits, and an entry for each layer
    that differs."""
    kinds = {
        name: {"group_size": scheme.weights.group_size, "bits": scheme.weights.bits, "mode": "affine"}
        for name, scheme in layers.items()
    }
    found = list(kinds.values())
    usual = max(found, key=found.count)
    return {**usual, **{name: kind for name, kind in kinds.items() if kind != usual}}
