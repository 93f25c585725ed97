"""A Hadamard matrix before a layer, computed while the model runs, whose inverse lies in the layer's weight.

An outlier of an input is spread over all values of its block, so that one scale fits them (QuaRot, arXiv 2404.00456,
section 4). It is for inputs that no weight before them can turn: that of ``down_proj`` is a product of two activations.

Blocks of B features are turned each by itself, ``x H / sqrt(B)`` with Sylvester's H, which is symmetric: the matrix is
its own inverse, and the gradient of the product is the same product. B is a power of 4, so that 1 / sqrt(B) is a power
of two: every entry is a number of fp16 and bf16, a product with one is exact, and what is computed is the sum alone, in
fp32, rounded once. It is the transform of the type ``hadamard`` of compressed-tensors (0.20.0,
``transform/factory/hadamard.py``), which has the sum in fp32, too.
"""

from contextlib import nullcontext

import torch
from torch import Tensor

BLOCKS = (64, 256, 1024)

_MATRICES: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}


def hadamard(block: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Sylvester's matrix ``[block, block]`` of 1 and -1; ``block`` is a power of two."""
    matrix = torch.ones(1, 1, dtype=dtype, device=device)
    while len(matrix) < block:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def rotate(values: Tensor, block: int) -> Tensor:
    """``values [..., n block]`` with each run of ``block`` along the last axis turned; differentiable.

    Twice is once back: a weight ``[out, in]`` turned so takes inputs turned so.
    """
    device = values.device.type
    autocast = device != "meta" and torch.is_autocast_enabled(device)  # which knows no meta device
    with torch.autocast(device, enabled=False) if autocast else nullcontext():
        turned = values.unflatten(-1, (-1, block)) @ _matrix(block, values.dtype, values.device)
    return turned.flatten(-2)


def _matrix(block: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The orthogonal matrix, made once for each dtype and device."""
    if torch.compiler.is_compiling():  # the compiler sees constants
        return hadamard(block, dtype, device) / block**0.5
    key = (block, dtype, device)
    if key not in _MATRICES:
        with torch.inference_mode(False), torch.no_grad():
            _MATRICES[key] = hadamard(block, dtype, device) / block**0.5
    return _MATRICES[key]
