"""Block-wise Hadamard rotation of a layer's input at run time; the layer's weight contains the inverse rotation.

The rotation spreads an outlier over its block, so that one scale fits all values (QuaRot, arXiv 2404.00456, section 4).
It is meant for inputs whose rotation cannot be folded into a preceding weight: the input of ``down_proj`` is a product
of two activations.

Each block of B features becomes ``x H / sqrt(B)`` with Sylvester's symmetric H. The matrix is its own inverse, and the
gradient of the product is the same product. B is a power of 4, so that 1 / sqrt(B) is a power of two: every entry is
exact in fp16 and bf16, products with it are exact, and only the fp32 sum is rounded, once. The type ``hadamard`` of
compressed-tensors (0.20.0, ``transform/factory/hadamard.py``) is the same rotation and also sums in fp32.
"""

from contextlib import nullcontext

import torch
from torch import Tensor

BLOCKS = (64, 256, 1024)

_MATRICES: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}


def hadamard(block: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Build Sylvester's matrix ``[block, block]`` of 1 and -1; ``block`` is a power of two."""
    matrix = torch.ones(1, 1, dtype=dtype, device=device)
    while len(matrix) < block:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def rotate(values: Tensor, block: int) -> Tensor:
    """Rotate each block of ``block`` values along the last axis of ``values [..., n block]``; differentiable.

    The rotation is its own inverse, and a weight ``[out, in]`` rotated by this function takes inputs rotated by it.
    """
    device = values.device.type
    autocast = device != "meta" and torch.is_autocast_enabled(device)  # raises for the meta device
    with torch.autocast(device, enabled=False) if autocast else nullcontext():
        rotated = values.unflatten(-1, (-1, block)) @ _matrix(block, values.dtype, values.device)
    return rotated.flatten(-2)


def _matrix(block: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the orthogonal matrix ``[block, block]``, cached for each dtype and device."""
    if torch.compiler.is_compiling():  # no cache: the compiler folds constants
        return hadamard(block, dtype, device) / block**0.5
    key = (block, dtype, device)
    if key not in _MATRICES:
        with torch.inference_mode(False), torch.no_grad():
            _MATRICES[key] = hadamard(block, dtype, device) / block**0.5
    return _MATRICES[key]
