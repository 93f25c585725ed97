"""The weight of a layer whose product is no plain GEMM, such as lm_head: fake-quantised by itself, differentiable."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from quant import kernels
from quant.function import used_weight
from quant.held import codes_of_stand_in, stands_in
from quant.scale import Quantizer, Scale, lsq_factor
from quant.spec import TensorSpec


class UsedWeightFunction(torch.autograd.Function):
    """Fake-quantises a weight for a layer whose product is not a plain GEMM. The caller holds the fake-quantised copy.

    ``apply(spec, numel, weight, *scale)``, where ``numel`` weights share one scale. It saves the Parameters.
    """

    @staticmethod
    def forward(ctx: Any, spec: TensorSpec, numel: int, weight: Tensor, *scale: Any) -> Tensor:
        ctx.save_for_backward(weight, *scale)
        ctx.spec, ctx.factor = spec, lsq_factor(numel, spec)
        codes = codes_of_stand_in(weight, spec) if stands_in(weight) else None
        return used_weight(weight, Quantizer(Scale(*scale), spec, weight.dtype), codes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _, _, needs_weight, _, needs_theta, *_ = ctx.needs_input_grad
        weight, *scale = ctx.saved_tensors
        grad_weight = grad.clone(memory_format=torch.contiguous_format)
        if stands_in(weight):  # as above
            grad_theta = torch.zeros_like(scale[1]) if needs_theta else None
            return None, None, grad_weight if needs_weight else None, None, grad_theta, None, None
        quantizer = Quantizer(Scale(*scale), ctx.spec, weight.dtype)
        grad_theta = kernels.fake_quantize_backward_(
            grad_weight, weight, quantizer, factor=ctx.factor, theta_gradient=needs_theta, of_weight=True
        )
        return None, None, grad_weight if needs_weight else None, None, grad_theta, None, None
