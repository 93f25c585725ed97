"""Decoupled scales: a weight's codes are chosen with another scale than the one that is stored.

::

    code = round(w * exp(code_theta) / s)     w_hat = code * s

The stored scale ``s`` alone is exported, so readers see an ordinary quantized weight. The weight ``w`` is frozen. The
gradients are those of the quantizer (``quant/reference.py``) at the weight ``w * exp(code_theta)``; the gradient of
code_theta is the sum over the elements of this weight's gradient times this weight. AngelSlim calls this FOCUS.

As in :func:`quant.lora.merge` the factor is computed in fp64, so that a GPU, another machine and any slice of the
weight get the same bits, and the product is rounded to the weight's dtype.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from quant.blocks import per_block, per_run
from quant.spec import TensorSpec

# Elements multiplied at a time: on a CPU few enough for its caches; on a GPU their fp32 products take 256 MB.
CPU_ELEMENTS, GPU_ELEMENTS = 2**18, 2**26


class DecoupledScale:
    """Factors on one layer's weight, from which its codes are chosen; see :class:`quant.lora.Adapter`.

    Attributes:
        parameters: names of the Parameters that the layer registers.
        merges: True, as the factors are part of the weight that is quantized.
        code_theta: logarithm of the factors, in the shape of the weight's scale and the weight's dtype; starts at 0.
        spec: number format of the weight.
    """

    parameters = ("code_theta",)
    merges = True

    def __init__(self, code_theta: nn.Parameter, spec: TensorSpec) -> None:
        self.code_theta, self.spec = code_theta, spec

    def merged(self, weight: Tensor) -> Tensor:
        """Return ``weight * exp(code_theta)`` in the weight's dtype. Parameters must be gathered."""
        return weight_for_codes(weight, self.code_theta, self.spec)


@torch.no_grad()
def weight_for_codes(weight: Tensor, code_theta: Tensor, spec: TensorSpec) -> Tensor:
    """Compute ``weight * exp(code_theta)``, rounded once to the weight's dtype: a new tensor without a gradient.

    Args:
        weight: ``[out, in]``, or a stack ``[E, out, in]``.
        code_theta: logarithm of the factors, in the shape of the weight's scale.
        spec: number format of the weight.
    """
    factors = _runs(code_theta, weight.shape, spec)
    result = torch.empty_like(weight, memory_format=torch.contiguous_format)
    for own, out, old in _parts(factors, result, weight.contiguous()):
        torch.mul(old, own, out=out)
    return result


@torch.no_grad()
def part_for_codes(
    part: Tensor, start: int, weight_shape: tuple[int, ...], code_theta: Tensor, spec: TensorSpec
) -> Tensor:
    """Compute elements ``[start, start + len(part))`` of :func:`weight_for_codes`, flat, from the same elements of the
    weight; their bits are the same."""
    factors = _runs(code_theta, weight_shape, spec).to(part.device).flatten()
    places = torch.arange(start, start + part.numel(), device=part.device) // spec.run_length(weight_shape)
    return (part * factors[places]).to(part.dtype)


def code_theta_gradient(grad: Tensor, weight: Tensor, code_theta: Tensor, spec: TensorSpec, factor: float) -> Tensor:
    """Compute the gradient of code_theta, times ``factor``.

    Args:
        grad, weight: gradient of, and values of, the weight that was quantized (:func:`weight_for_codes`).
        code_theta, spec: as in that function.
        factor: LSQ's gradient scale, as for theta.
    """
    runs = weight.numel() // spec.run_length(tuple(weight.shape))
    sums = torch.empty((runs, 1), dtype=torch.float32, device=grad.device)
    for out, left, right in _parts(sums, grad.contiguous(), weight):
        torch.sum(left.float() * right, -1, keepdim=True, out=out)
    if spec.granularity == "block":
        sums = per_block(sums.view(*weight.shape[:-1], -1), weight.shape, spec).sum(-2)
    return sums.view(code_theta.shape).mul_(factor).to(code_theta.dtype)


def _runs(code_theta: Tensor, weight_shape: tuple[int, ...], spec: TensorSpec) -> Tensor:
    """Compute the factor of each run of consecutive elements that share one, fp32 ``[runs, 1]``."""
    return per_run(code_theta.detach().double().exp().float(), weight_shape, spec).reshape(-1, 1)


def _parts(first: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield parts of contiguous tensors as views ``[runs, run]``: of ``first [runs, 1]``, and the same of others."""
    views = [first, *(one.view(len(first), -1) for one in others)]
    most = CPU_ELEMENTS if first.device.type == "cpu" else GPU_ELEMENTS
    runs = max(1, most // max(1, views[-1].shape[-1]))
    return zip(*[one.split(runs) for one in views], strict=True)
