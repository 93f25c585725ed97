"""Decoupled scales: a weight's codes are chosen with another scale than the one that is stored.

::

    code = round(w * exp(code_theta) / s)     w_hat = code * s

The stored scale ``s`` alone is exported, so readers see an ordinary quantized weight. The weight ``w`` is frozen. The
gradients are those of the quantizer (``quant/reference.py``) at the weight ``w * exp(code_theta)``; the gradient of an
element of code_theta is that weight's gradient times that weight, summed over the weights that share the element.
AngelSlim calls this method FOCUS.

As in :func:`quant.lora.merge` the factor is computed in fp64, so that a GPU, another machine and any slice of the
weight get the same bits, and the product is rounded to the weight's dtype.
"""

import torch
from torch import Tensor, nn

from quant import kernels
from quant.spec import TensorSpec, per_block, per_run


class DecoupledScale:
    """Factors that multiply one layer's weight before its codes are chosen; used like a :class:`quant.lora.Adapter`.

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
    """Compute ``weight * exp(code_theta)``, rounded once to the weight's dtype: a new tensor without a gradient. The
    weight is ``[out, in]``, or a stack ``[E, out, in]``; ``code_theta`` has the shape of its scale."""
    return kernels.multiply_runs(weight, per_run(code_theta, weight.shape, spec))


@torch.no_grad()
def part_for_codes(
    part: Tensor, start: int, weight_shape: tuple[int, ...], code_theta: Tensor, spec: TensorSpec
) -> Tensor:
    """Compute the elements ``[start, start + len(part))`` of the flattened result of :func:`weight_for_codes`, with the
    same bits, from ``part``: these elements of the flattened weight. ``weight_shape`` is the whole weight's shape."""
    theta = per_run(code_theta, weight_shape, spec).to(part.device).flatten()
    factors = kernels.multiply_runs(torch.ones_like(theta, dtype=torch.float32), theta)
    places = torch.arange(start, start + part.numel(), device=part.device) // spec.run_length(weight_shape)
    return (part * factors[places]).to(part.dtype)


def code_theta_gradient(grad: Tensor, weight: Tensor, code_theta: Tensor, spec: TensorSpec, factor: float) -> Tensor:
    """Compute the gradient of code_theta, times ``factor`` (LSQ's gradient scale, as for theta), in the shape and dtype
    of code_theta. ``weight`` is the result of :func:`weight_for_codes`, ``grad`` its gradient."""
    if spec.granularity != "block":
        return kernels.sum_products(grad, weight, code_theta, factor)
    sums = kernels.sum_products(grad, weight, per_run(code_theta.float(), weight.shape, spec), factor)
    return per_block(sums, weight.shape, spec).sum(-2).to(code_theta.dtype)
