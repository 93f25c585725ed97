"""Weights moved into the cells of codes. A *cell* is what a code stands for: all numbers that are rounded to it.

Whoever chooses codes otherwise than by rounding (GPTQ, another tool's file) and trains weights, which are rounded,
moves the weights to where rounding gives the codes: no further than that, for what they are beside it is the
original's.
"""

import torch
from torch import Tensor

from quant import kernels
from quant.scale import Quantizer


def have_codes(values: Tensor, codes: Tensor, quantizer: Quantizer) -> Tensor:
    """Which ``values`` are rounded to ``codes``, a bool tensor of their shape."""
    found, _ = kernels.quantize(values, quantizer)
    return found.view(torch.uint8) == codes.view(torch.uint8)


def into_cells(weight: Tensor, codes: Tensor, quantizer: Quantizer) -> Tensor:
    """``weight``, and where it is rounded to another code the number nearest to it, in its dtype, that is rounded to
    ``codes``.

    Numbers of a dtype in their order are integers in theirs, and those with one code lie behind one another: a search
    between the decoded weight, which has the code, and the original.
    """
    stays = have_codes(weight, codes, quantizer)
    good, bad = _ordered(kernels.dequantize(codes, quantizer)), _ordered(weight)
    for _ in range(8 * weight.element_size() + 1):
        middle = (good + bad).div(2, rounding_mode="floor")
        inside = have_codes(_from_ordered(middle, weight.dtype), codes, quantizer)
        good, bad = torch.where(inside, middle, good), torch.where(inside, bad, middle)
    return torch.where(stays, weight, _from_ordered(good, weight.dtype))


def _ordered(values: Tensor) -> Tensor:
    """int64 in the order of floating-point numbers."""
    bits = 8 * values.element_size()
    integers = values.view(torch.int16 if bits == 16 else torch.int32).long()
    return torch.where(integers < 0, integers ^ (2 ** (bits - 1) - 1), integers)


def _from_ordered(integers: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers of :func:`_ordered`."""
    bits = 8 * dtype.itemsize
    integers = torch.where(integers < 0, integers ^ (2 ** (bits - 1) - 1), integers)
    return integers.to(torch.int16 if bits == 16 else torch.int32).view(dtype)
