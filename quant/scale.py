"""One scale as one object, and the quantizer that it makes of a format.

A scale travels as a :class:`Scale` wherever its parts belong together. It is taken apart only where torch wants single
tensors: in the arguments of an autograd function and of an operator, and where a module registers its Parameters.

Weights moved into the cells of codes. A *cell* is what a code stands for: all numbers that are rounded to it.

Whoever chooses codes otherwise than by rounding (GPTQ, another tool's file) and trains weights, which are rounded,
moves those weights that would be rounded to another code. They become what the code stands for, the middle of its cell.
On its border, which is nearer to the original, the first steps of training take every other one of them out again; and
weights that are in their cells stay, for what they are beside the code is the original's
(benchmarks/results/recovery_start_remarks.md).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from quant import kernels
from quant.reference import absmax_scale, global_scale
from quant.spec import TensorSpec


class Scale(NamedTuple):
    """The scale of one tensor, ``s = s0 * exp(theta)``, and what belongs to it.

    The parts are Parameters where a module or a group holds them, and may then be ZeRO-3 partitions.

    Attributes:
        s0: the frozen scale as loaded or measured, fp32, in the shape that :meth:`quant.spec.TensorSpec.scale_shape`
            says, ``(1,)`` of an input.
        theta: its learned logarithmic correction, in s0's shape and any float dtype, or None.
        global_: the scale above scales that are stored in e4m3 (NVFP4), fp32 ``(1,)``, or of a stack one per expert;
            None of other formats.
        zero: the zero points, fp32, in s0's shape; None where the grid is symmetric.
    """

    s0: Tensor
    theta: Tensor | None = None
    global_: Tensor | None = None
    zero: Tensor | None = None


class Quantizer(NamedTuple):
    """What the functions of :mod:`quant.kernels` need to know of a tensor in order to quantize it.

    Attributes:
        scale: its scale, with all Parameters gathered.
        spec: its number format.
        dtype: that of the model's weights, to which scales of integers are rounded.
    """

    scale: Scale
    spec: TensorSpec
    dtype: torch.dtype


def first_input_scale(absmax: Tensor, spec: TensorSpec) -> Tensor:
    """The stored scale of an input whose largest magnitude was ``absmax``, fp32: its own, or the one above dynamic
    scales."""
    return global_scale(absmax, spec) if spec.dynamic else absmax_scale(absmax, spec)


def lsq_factor(numel: int, spec: TensorSpec) -> float:
    """LSQ's gradient scale (Esser et al. 2020, section 2.2): ``1/sqrt(numel * qmax)``."""
    return 1 / math.sqrt(numel * spec.qmax)


def have_codes(values: Tensor, codes: Tensor, quantizer: Quantizer) -> Tensor:
    """Which ``values`` are rounded to ``codes``, a bool tensor of their shape."""
    found, _ = kernels.quantize(values, quantizer)
    return found.view(torch.uint8) == codes.view(torch.uint8)


def snap_to_codes(weight: Tensor, decoded: Tensor, codes: Tensor, quantizer: Quantizer) -> Tensor:
    """``weight``, and where it is rounded to another code what ``codes`` stand for: ``decoded``, in its dtype."""
    return torch.where(have_codes(weight, codes, quantizer), weight, decoded)
