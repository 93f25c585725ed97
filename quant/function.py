"""A Linear with fake-quantised operands, and its gradients: the `simulate` computation.

The forward is ``F.linear(fq(x), fq(weight), bias)`` in the model's dtype. What autograd would keep for its backward
decides whether this can train a model that no device holds: a fake-quantised weight is not a leaf, so plain autograd
keeps the whole tensor alive and defeats ZeRO-3. This function therefore saves

* the weight **Parameter** (under ZeRO-3 the gathered one comes back in backward) and quantises it again,
* the scale Parameters, a few bytes,
* of the input: the 1-byte codes and a 1-bit mask of what was not clipped, when its scale is fixed; the input itself
  when its scale learns or it is not quantised. Layers that read the same tensor then share one copy of it.

Nothing is saved or computed for an operand that needs no gradient.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from quant.reference import dequantize, effective_scale, fake_quant, fake_quant_backward, inside_range, quantize
from quant.spec import TensorSpec


@dataclass(frozen=True)
class Plan:
    """What :class:`QuantLinearFunction` does with each operand.

    Attributes:
        weight: how the weight is quantised, None to use it as it is.
        input: the same of the input.
        weight_numel: weights that share one scale, over all modules that share its Parameter.
        input_numel: features of the input. LSQ counts features, not tokens, so that the gradient of a batch is the sum
            of the gradients of its parts.
    """

    weight: TensorSpec | None
    input: TensorSpec | None
    weight_numel: int
    input_numel: int


class _Saved(NamedTuple):
    """What backward keeps, in the order of ``ctx.save_for_backward``."""

    weight: Tensor
    weight_s0: Tensor
    weight_theta: Tensor | None
    input_s0: Tensor
    input_theta: Tensor | None
    x: Tensor  # the input, or its codes
    mask: Tensor  # packed: which elements of a fixed-scale input were inside the range

    def weight_scale(self, spec: TensorSpec) -> Tensor:
        return effective_scale(self.weight_s0, self.weight_theta, spec, self.weight.dtype)

    def input_scale(self, spec: TensorSpec) -> Tensor:
        return effective_scale(self.input_s0, self.input_theta, spec, self.weight.dtype)


class QuantLinearFunction(torch.autograd.Function):
    """``apply(x, weight, bias, weight_s0, weight_theta, input_s0, input_theta, plan)``.

    ``x`` is ``[..., in]`` (zero tokens are allowed and give zero gradients, not None), ``weight`` ``[out, in]``,
    ``bias`` ``[out]`` or None, all in one dtype. Scales as in :func:`quant.reference.effective_scale`; None where not
    quantised or not learned. The result is ``[..., out]`` in ``x``'s dtype. Gradients have their tensors' dtypes.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        weight_s0: Tensor,
        weight_theta: Tensor | None,
        input_s0: Tensor | None,
        input_theta: Tensor | None,
        plan: Plan,
    ) -> Tensor:
        needs_x, needs_weight, _, needs_weight_s0, needs_weight_theta, needs_input_s0, needs_input_theta, _ = (
            ctx.needs_input_grad
        )
        if needs_weight_s0 or needs_input_s0:
            raise ValueError("weight_s0 and input_s0 are the frozen parts of the scales; train the thetas instead")
        used_weight, used_x = weight, x
        if plan.weight is not None:
            scale = effective_scale(weight_s0, weight_theta, plan.weight, weight.dtype)
            used_weight = fake_quant(weight, scale, plan.weight)
        kept_x = x if needs_weight or needs_weight_theta or needs_input_theta else None
        kept_mask = None
        if plan.input is not None:
            assert input_s0 is not None
            scale = effective_scale(input_s0, input_theta, plan.input, weight.dtype)
            if needs_input_theta:
                used_x = fake_quant(x, scale, plan.input)
            else:
                codes = quantize(x, scale, plan.input)
                used_x = dequantize(codes, scale, plan.input, x.dtype)
                kept_x = codes if kept_x is not None else None
                kept_mask = pack_bits(inside_range(x, scale, plan.input)) if needs_x else None
        ctx.save_for_backward(weight, weight_s0, weight_theta, input_s0, input_theta, kept_x, kept_mask)
        ctx.plan, ctx.input_shape, ctx.keeps_codes = plan, x.shape, plan.input is not None and not needs_input_theta
        # The operands are in the model's dtype already; autocast would hide from backward what the GEMM computed.
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(used_x, used_weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        needs_x, needs_weight, needs_bias, _, needs_weight_theta, _, needs_input_theta, _ = ctx.needs_input_grad
        saved = _Saved(*ctx.saved_tensors)  # once: activation checkpointing drops a tensor when it is unpacked
        grad = grad_output.reshape(-1, grad_output.shape[-1])  # [tokens, out]
        grad_x = grad_input_theta = grad_weight = grad_weight_theta = None
        if needs_x or (needs_input_theta and ctx.plan.input is not None):
            grad_x, grad_input_theta = _input_gradients(ctx, saved, grad)
        if needs_weight or (needs_weight_theta and ctx.plan.weight is not None):
            grad_weight, grad_weight_theta = _weight_gradients(ctx, saved, grad)
        # The theta of an operand that is not quantised now: ZeRO-3 keeps the gradient of the last step of a Parameter
        # that gets none, and would apply it again in every step.
        if saved.input_theta is not None and needs_input_theta and grad_input_theta is None:
            grad_input_theta = torch.zeros_like(saved.input_theta)
        if saved.weight_theta is not None and needs_weight_theta and grad_weight_theta is None:
            grad_weight_theta = torch.zeros_like(saved.weight_theta)
        return (
            grad_x if needs_x else None,
            grad_weight if needs_weight else None,
            grad.sum(0) if needs_bias else None,
            None,
            grad_weight_theta,
            None,
            grad_input_theta,
            None,
        )


def _input_gradients(ctx: Any, saved: _Saved, grad: Tensor) -> tuple[Tensor, Tensor | None]:
    """Gradients of the input ``[..., in]`` and of its theta from ``grad [tokens, out]``."""
    plan: Plan = ctx.plan
    used_weight = saved.weight
    if plan.weight is not None:
        used_weight = fake_quant(saved.weight, saved.weight_scale(plan.weight), plan.weight)
    grad_used = (grad @ used_weight).reshape(ctx.input_shape)
    if plan.input is None:
        return grad_used, None
    if ctx.keeps_codes:
        return grad_used.masked_fill_(~unpack_bits(saved.mask, grad_used.shape), 0), None
    grad_x, grad_scale = fake_quant_backward(
        grad_used, saved.x, saved.input_scale(plan.input), plan.input, scale_gradient=True
    )
    return grad_x, _theta_gradient(grad_scale, saved.input_s0, saved.input_theta, plan.input_numel * plan.input.qmax)


def _weight_gradients(ctx: Any, saved: _Saved, grad: Tensor) -> tuple[Tensor, Tensor | None]:
    """Gradients of the weight ``[out, in]`` and of its theta from ``grad [tokens, out]``."""
    plan: Plan = ctx.plan
    used_x = saved.x
    if plan.input is not None:
        scale = saved.input_scale(plan.input)
        used_x = (
            dequantize(saved.x, scale, plan.input, saved.weight.dtype)
            if ctx.keeps_codes
            else fake_quant(saved.x, scale, plan.input)
        )
    grad_used = grad.t() @ used_x.reshape(-1, used_x.shape[-1])
    if plan.weight is None:
        return grad_used, None
    grad_weight, grad_scale = fake_quant_backward(
        grad_used,
        saved.weight,
        saved.weight_scale(plan.weight),
        plan.weight,
        scale_gradient=ctx.needs_input_grad[4],
    )
    return grad_weight, _theta_gradient(
        grad_scale, saved.weight_s0, saved.weight_theta, plan.weight_numel * plan.weight.qmax
    )


def _theta_gradient(grad_scale: Tensor | None, s0: Tensor, theta: Tensor | None, lsq_divisor: float) -> Tensor | None:
    """Gradient of theta in its dtype: that of the scale by LSQ's factor, times ``ds/dtheta = s0 * exp(theta)``."""
    if grad_scale is None or theta is None:
        return None
    return (grad_scale * (s0.float() * torch.exp(theta.float())) / math.sqrt(lsq_divisor)).to(theta.dtype)


# Multiplying eight bytes of 0 or 1 by this collects them in the top byte, the first byte in its lowest bit.
_GATHER_BITS = 0x0102040810204080


def pack_bits(mask: Tensor) -> Tensor:
    """A bool tensor of any shape as a flat uint8 tensor of ``ceil(numel / 8)`` bytes."""
    flat = F.pad(mask.reshape(-1), (0, -mask.numel() % 8)).contiguous()
    return flat.view(torch.int64).mul(_GATHER_BITS).bitwise_right_shift_(56).to(torch.uint8)


def unpack_bits(packed: Tensor, shape: torch.Size) -> Tensor:
    """The bool tensor of ``shape`` that :func:`pack_bits` packed."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    bits = packed.unsqueeze(-1).bitwise_right_shift(shifts).bitwise_and_(1)
    return bits.view(-1)[: shape.numel()].view(torch.bool).view(shape)
