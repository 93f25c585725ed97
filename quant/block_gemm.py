"""The product of codes that have scales of their own for every 16 or 32 of a row, on tensor cores that apply these.

GPUs of compute capability 10.0 (Blackwell) multiply NVFP4 by NVFP4 and MXFP8 by MXFP8 in cuBLAS, which torch calls
``torch.nn.functional.scaled_mm`` with blocks of 1x16 or 1x32. Its operands are rows of codes, two of e2m1 in a byte,
the first in the low four bits; scales as they are stored, e4m3 or powers of two, in the order of :func:`swizzled`; and
of NVFP4 both global scales, by whose product the sums, which are fp32, are multiplied before they are rounded. MXFP4 is
not in cuBLAS; MXFP4 by MXFP8 is not in torch.

Simulation rounds each operand to the model's dtype first: of NVFP4 a value is a code times a scale over the global one.
Values of MX are exact in bf16, and there both ways differ in the order of their sums alone.

Nothing here has run on such a GPU. A CPU has no such kernel; there the same operands are multiplied in fp32.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quant import kernels
from quant.packing import pack_nibbles
from quant.scale import Quantizer
from quant.spec import TensorSpec

ROWS, COLUMNS = 128, 4  # of a tile of scales
SIDES = (16, 32)  # multiples of these are the rows and columns of a weight


class BlockCodes(NamedTuple):
    """An operand; of an input more dimensions may stand for its rows.

    Attributes:
        codes: ``[rows, in]`` e4m3, or ``[rows, in / 2]`` uint8 with two e2m1 codes in a byte.
        scales: ``[rows, in / 16]`` e4m3 (NVFP4), or ``[rows, in / 32]`` float8_e8m0fnu (MX).
        above: of NVFP4 the global scale that they were multiplied by, fp32 ``(1,)``; else None.
    """

    codes: Tensor
    scales: Tensor
    above: Tensor | None


def weight_codes(codes: Tensor, scale: Tensor, quantizer: Quantizer) -> BlockCodes:
    """The operand that a weight ``[out, in]`` is, of its codes and effective scales as
    :func:`quant.kernels.quantize_with_scale` gives them."""
    above = quantizer.scale.global_
    four = quantizer.spec.dtype == "fp4_e2m1"
    stored = scale.to(torch.float8_e8m0fnu) if above is None else (scale * above).to(torch.float8_e4m3fn)
    return BlockCodes(pack_nibbles(codes) if four else codes, stored, above)


def product(
    x: Tensor, kept: BlockCodes, weight: Tensor, quantizer: Quantizer, codes: Tensor | None, bias: Tensor | None
) -> Tensor:
    """A layer's product: ``[..., out]`` of an input ``x [..., in]`` and a weight ``[out, in]``, without a gradient.

    Args:
        x: gives its shape; ``kept`` is what :func:`quant.kernels.keep_tokens` made of it, nothing of no tokens.
        weight, quantizer, codes: the weight, its scales and format, and its codes if they are known.
        bias: ``[out]`` or None.
    """
    if x.numel() == 0:
        return x.new_zeros(*x.shape[:-1], len(weight))
    if codes is None:
        codes, scale = kernels.quantize_with_scale(weight, quantizer)
    else:
        scale = kernels.effective_scale(quantizer)
    operand = weight_codes(codes, scale, quantizer)
    width, groups = operand.codes.shape[-1], operand.scales.shape[-1]
    rows = BlockCodes(kept.codes.reshape(-1, width), kept.scales.reshape(-1, groups), kept.above)
    output = block_scaled_linear(rows, operand, bias, quantizer.spec, weight.dtype)
    return output.view(*x.shape[:-1], -1)


def block_scaled_linear(
    x: BlockCodes, weight: BlockCodes, bias: Tensor | None, spec: TensorSpec, dtype: torch.dtype
) -> Tensor:
    """``x @ weight.t() + bias`` of the values that the codes stand for, ``[rows, out]`` in ``dtype``.

    Args:
        x, weight: operands of one format; :func:`divides` says of which weights.
        bias: ``[out]`` in ``dtype``, or None.
        spec: the format of both.
        dtype: of the result: bf16, or on a CPU any.
    """
    if x.codes.device.type == "cpu":
        return _emulated(x, weight, bias, spec, dtype)
    four = spec.dtype == "fp4_e2m1"
    block = F.ScalingType.BlockWise1x16 if spec.has_global_scale else F.ScalingType.BlockWise1x32
    operands, scales = [], []
    for one in (x, weight):
        operands.append(_aligned(one.codes.view(torch.float4_e2m1fn_x2) if four else one.codes))
        scales.append([swizzled(one.scales), *([] if one.above is None else [one.above.reciprocal()])])
    recipe = [block, F.ScalingType.TensorWise][: len(scales[0])]
    order = [F.SwizzleType.SWIZZLE_32_4_4, F.SwizzleType.NO_SWIZZLE][: len(recipe)]
    (x_codes, codes), (x_scales, weight_scales) = operands, scales
    return F.scaled_mm(
        x_codes, codes.t(), x_scales, recipe, weight_scales, recipe, order, order, bias=bias, output_dtype=dtype
    )


def divides(in_features: int, out_features: int) -> bool:
    """Whether the sides of a weight are those that :func:`block_scaled_linear` takes."""
    return out_features % SIDES[0] == 0 and in_features % SIDES[1] == 0


def swizzled(scales: Tensor) -> Tensor:
    """Scales ``[rows, n]`` of one byte in the order in which tensor cores read them, flat.

    Tiles of 128 x 4 scales lie one behind another, along a row of tiles first; scale (i, j) of a tile is its byte
    ``16 (i mod 32) + 4 (i div 32) + j``. What a tile has beyond the tensor is 0. (cuBLAS, "1D Block Scaling Factors
    Layout".)
    """
    rows, columns = scales.shape
    padded = F.pad(scales.view(torch.uint8), (0, -columns % COLUMNS, 0, -rows % ROWS))
    tiles = padded.view(-1, ROWS // 32, 32, padded.shape[1] // COLUMNS, COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(scales.dtype)


def _aligned(codes: Tensor) -> Tensor:
    """Contiguous, from a whole 16 bytes on: a Parameter that was gathered may begin anywhere."""
    codes = codes.contiguous()
    return codes.clone() if codes.is_cuda and codes.data_ptr() % 16 else codes


def _emulated(x: BlockCodes, weight: BlockCodes, bias: Tensor | None, spec: TensorSpec, dtype: torch.dtype) -> Tensor:
    """The same operands in fp32: codes times stored scales are exact there, only sums are rounded."""
    values = [
        kernels.restore_tokens(one.codes, one.scales, spec, torch.float32, None, after=None) for one in (x, weight)
    ]
    output = values[0] @ values[1].t()
    if x.above is not None and weight.above is not None:
        output *= x.above.reciprocal() * weight.above.reciprocal()
    return (output if bias is None else output + bias.float()).to(dtype)
