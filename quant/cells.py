"""Weights moved into the cells of codes. A *cell* is what a code stands for: all numbers that are rounded to it.

Whoever chooses codes otherwise than by rounding (GPTQ, another tool's file) and trains weights, which are rounded,
moves those weights that would be rounded to another code. They become what the code stands for, the middle of its cell.
On its border, which is nearer to the original, the first steps of training take every other one of them out again; and
weights that are in their cells stay, for what they are beside the code is the original's
(benchmarks/results/recovery_start_remarks.md).
"""

import torch
from torch import Tensor

from quant import kernels
from quant.scale import Quantizer


def have_codes(values: Tensor, codes: Tensor, quantizer: Quantizer) -> Tensor:
    """Which ``values`` are rounded to ``codes``, a bool tensor of their shape."""
    found, _ = kernels.quantize(values, quantizer)
    return found.view(torch.uint8) == codes.view(torch.uint8)


def into_cells(weight: Tensor, decoded: Tensor, codes: Tensor, quantizer: Quantizer) -> Tensor:
    """``weight``, and where it is rounded to another code what ``codes`` stand for: ``decoded``, in its dtype."""
    return torch.where(have_codes(weight, codes, quantizer), weight, decoded)
