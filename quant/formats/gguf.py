"""Codes and scales of one Linear as llama.cpp's blocks of 32 weights: Q4_0, Q8_0 and MXFP4 (``block_q4_0``, ...), or of
64 weights: NVFP4.

A block begins with its scale ``d`` in fp16, little-endian. In Q4_0, 16 bytes follow: byte ``i`` stores element ``i`` in
its low four bits and element ``i + 16`` in its high four bits, each as ``code + 8``. In Q8_0, 32 signed bytes follow.
Both decode to ``d * code``; ``d`` may be negative.

The presets ``q4_0`` and ``q8_0`` train with fp16 scales. The scales of ``w4a16_g32`` and ``w8a16_g32`` are in the
model's dtype. fp16 represents every bf16 number between 2^-17 and 65504 exactly, so the blocks decode to the weights of
a bf16 model's last forward. A scale outside this interval is an error, unless all its codes are 0.

A block of MXFP4 begins with the exponent byte (E8M0) of its scale, then 16 bytes store the e2m1 codes as in Q4_0. All
scales of ``mxfp4`` fit. A block of NVFP4 begins with the e4m3 scales of its four groups of 16, then 8 bytes store the
e2m1 codes of each group: the first half in the low four bits. The scale of the tensor, as ModelOpt stores it
(:mod:`quant.formats.modelopt`), is a tensor of its own.

Q4_1 has ``d * code + m`` with both in fp16: ``m``, the scale times a zero point of 4 bits, has up to 12 significant
bits for a bf16 scale, one more than fp16. So no scheme here fits it exactly.
"""

from collections.abc import Mapping

import torch

from quant.formats.compressed_tensors import Shapes
from quant.formats.modelopt import reciprocal
from quant.spec import NVFP4_GROUP, SCHEMES, Scheme

BLOCK = 32  # weights that share a scale
NVFP4_BLOCK = 4 * NVFP4_GROUP
TENSOR_SCALE = "scale"  # suffix of the scale of a tensor in NVFP4

_TYPES = {SCHEMES["q4_0"]: "Q4_0", SCHEMES["q8_0"]: "Q8_0", SCHEMES["w4a16_g32"]: "Q4_0", SCHEMES["w8a16_g32"]: "Q8_0"}
_TYPES |= {SCHEMES["mxfp4"]: "MXFP4", SCHEMES["nvfp4"]: "NVFP4"}
# Weights and bytes of a block.
SIZES = {"Q4_0": (BLOCK, 2 + BLOCK // 2), "Q8_0": (BLOCK, 2 + BLOCK), "MXFP4": (BLOCK, 1 + BLOCK // 2)}
SIZES["NVFP4"] = (NVFP4_BLOCK, 4 + NVFP4_BLOCK // 2)


def block_type(scheme: Scheme) -> str:
    """Return GGUF's block type, a key of :data:`SIZES`, that stores weights of ``scheme`` without loss. Raises
    ValueError if there is none; the message names the nearest supported scheme."""
    for known, name in _TYPES.items():
        if (scheme.weights.wide, scheme.activations) == (known.weights, known.activations):
            return name
    fp4 = "nvfp4" if scheme.weights.has_global_scale else "mxfp4"
    nearest = fp4 if scheme.weights.dtype == "fp4_e2m1" else "q4_0" if scheme.weights.bits <= 4 else "q8_0"
    raise ValueError(
        f"layout 'gguf' holds {', '.join(f'{known.name} ({name})' for known, name in _TYPES.items())}, got "
        f"{scheme.name}; the nearest is {nearest}"
    )


def gguf_shapes(in_features: int, out_features: int, scheme: Scheme) -> Shapes:
    """Return dtypes and shapes of the tensors for one Linear, by the suffix of their keys. Raises ValueError if
    ``in_features`` is not a multiple of the block size."""
    kind = block_type(scheme)
    weights, size = SIZES[kind]
    if in_features % weights:
        raise ValueError(
            f"layout 'gguf' holds {scheme.name} in blocks of {weights} weights, got a layer with {in_features} inputs: "
            "exempt such layers"
        )
    scale: Shapes = {TENSOR_SCALE: (torch.float32, (1,))} if kind == "NVFP4" else {}
    return {"weight": (torch.uint8, (out_features, in_features // weights * size)), **scale}


def gguf_tensors(
    key: str, codes: torch.Tensor, scale: torch.Tensor, packed: Mapping[str, torch.Tensor], scheme: Scheme
) -> dict[str, torch.Tensor]:
    """Build the tensors of one Linear by suffix. ``packed`` has the Linear's tensors in compressed-tensors' layout. For
    the other arguments and the errors see :func:`blocks`."""
    kind = block_type(scheme)
    if kind != "NVFP4":
        return {"weight": blocks(key, codes, scale, kind)}
    groups = codes.unflatten(1, (-1, 4, NVFP4_GROUP))
    head = packed["weight_scale"].view(torch.uint8).unflatten(1, (-1, 4))
    weight = torch.cat([head, _nibbles(groups).flatten(2)], dim=-1).flatten(1)
    return {"weight": weight, TENSOR_SCALE: reciprocal(packed["weight_global_scale"], None)}


def blocks(key: str, codes: torch.Tensor, scale: torch.Tensor, kind: str) -> torch.Tensor:
    """Build the bytes of a weight's blocks of the type ``kind`` (not NVFP4): uint8 ``[out, in / 32 * bytes of a
    block]``. ``codes`` are int8 ``[out, in]`` in CPU memory, uint8 for e2m1; ``scale`` is the effective scale of the
    forward, ``[out, in / 32]``. Raises ValueError, with the scale's name ``key``, if fp16 cannot represent a scale."""
    groups = codes.unflatten(1, (-1, BLOCK))
    scale = scale.cpu().float()
    if kind == "MXFP4":
        exponents = (torch.frexp(scale).exponent + 126).to(torch.uint8)
        return torch.cat([exponents.unsqueeze(-1), _nibbles(groups)], dim=-1).flatten(1)
    d = scale.to(torch.float16)
    empty = groups.eq(0).all(-1)
    d[empty] = 0
    wrong = d.float().ne(scale) & ~empty
    if bool(wrong.any()):
        raise ValueError(
            f"{key}: fp16 does not hold {int(wrong.sum())} of {wrong.numel()} scales, {scale[wrong][0].item():.4g} "
            "among them (those of bf16 fit from 7.7e-6 to 65504 in magnitude): exempt this layer, or export it with "
            "another export.format"
        )
    body = _nibbles((groups + 8).to(torch.uint8)) if kind == "Q4_0" else groups.contiguous().view(torch.uint8)
    head = d.unsqueeze(-1).contiguous().view(torch.uint8)  # native byte order, little-endian
    return torch.cat([head, body], dim=-1).flatten(1)


def _nibbles(groups: torch.Tensor) -> torch.Tensor:
    """Pack codes 0 to 15 ``[..., n]`` into bytes ``[..., n / 2]``: the first half in the low nibbles."""
    first, second = groups.chunk(2, dim=-1)
    return first | second << 4
