"""Scale of one tensor, and the quantizer of a scale and a format.

A scale is passed as a :class:`Scale`, except where torch needs single tensors: arguments of an autograd function or an
operator, and Parameters of a module.

The rounding bin of a code is the set of all numbers that round to it. If codes were not chosen by rounding to nearest
(GPTQ, a file of another tool) and the weight trains, :func:`snap_to_codes` moves each weight outside the bin of its
code to the middle of the bin. On the edge of the bin, nearer to the original, the first training steps would move every
other weight out again. Weights inside their bin keep their original value
(benchmarks/results/recovery_start.md).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from quant import kernels
from quant.reference import absmax_scale, global_scale
from quant.spec import TensorSpec


class Scale(NamedTuple):
    """Scale of one tensor, ``s = s0 * exp(theta)``, with its zero points and global scale.

    In a module or a scale group the fields are Parameters, possibly ZeRO-3 partitions.

    Attributes:
        s0: frozen scale as loaded or measured, fp32, in the shape of :meth:`quant.spec.TensorSpec.scale_shape`;
            ``(1,)`` for an input.
        theta: learned logarithmic correction, in the shape of ``s0`` and any float dtype, or None.
        global_: scale above scales stored in e4m3 (NVFP4), fp32 ``(1,)``, for a stack one per expert; None for other
            formats.
        zero: zero points, fp32, in the shape of ``s0``; None for a symmetric grid.
    """

    s0: Tensor
    theta: Tensor | None = None
    global_: Tensor | None = None
    zero: Tensor | None = None


class Quantizer(NamedTuple):
    """Scale, number format and dtype of a tensor, as the functions of :mod:`quant.kernels` take them.

    Attributes:
        scale: the tensor's scale, all Parameters gathered.
        spec: its number format.
        dtype: dtype of the model's weights, to which scales of integers are rounded.
    """

    scale: Scale
    spec: TensorSpec
    dtype: torch.dtype


def first_input_scale(absmax: Tensor, spec: TensorSpec) -> Tensor:
    """Stored scale, fp32, of an input with largest magnitude ``absmax``: for dynamic scales the global one."""
    return global_scale(absmax, spec) if spec.dynamic else absmax_scale(absmax, spec)


def lsq_factor(numel: int, spec: TensorSpec) -> float:
    """LSQ's gradient scale (Esser et al. 2020, section 2.2): ``1/sqrt(numel * qmax)``."""
    return 1 / math.sqrt(numel * spec.qmax)


def have_codes(values: Tensor, codes: Tensor, quantizer: Quantizer) -> Tensor:
    """Compare the codes of ``values`` with ``codes``: a bool tensor of their shape."""
    found, _ = kernels.quantize(values, quantizer)
    return found.view(torch.uint8) == codes.view(torch.uint8)


def snap_to_codes(weight: Tensor, decoded: Tensor, codes: Tensor, quantizer: Quantizer) -> Tensor:
    """Replace each element of ``weight`` that does not round to its code in ``codes`` by ``decoded``, the codes' values
    in the dtype of ``weight``."""
    return torch.where(have_codes(weight, codes, quantizer), weight, decoded)
