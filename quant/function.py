"""A Linear with quantised operands, and its gradients: one function, computed in one of two ways.

*simulate* multiplies fake-quantised operands in the model's dtype, ``F.linear(fq(x), fq(weight), bias)``; *fp8_gemm*
multiplies the codes on the fp8 tensor cores and the result by both scales. Backward is the same for both: GEMMs of the
dequantised operands in the model's dtype.

What is kept for backward decides whether this can train a model that no device holds: a fake-quantised weight is not a
leaf, so plain autograd keeps the whole tensor alive and defeats ZeRO-3. This function therefore saves

* the weight **Parameter** (under ZeRO-3 the gathered one comes back in backward) and quantises it again, unless its
  codes are kept anyway because the weight stays resident,
* the scale Parameters, a few bytes,
* of the input: the 1-byte codes and a 1-bit mask of what was not clipped, when its scale is fixed; the input itself
  when its scale learns or it is not quantised. Layers that read the same tensor share one copy of it.

Nothing is saved or computed for an operand that needs no gradient.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from quant import kernels
from quant.inputs import QuantizedInput, SharedInput, quantize_input
from quant.spec import TensorSpec


@dataclass(frozen=True)
class Plan:
    """What :func:`quant_linear` does with each operand.

    Attributes:
        weight: how the weight is quantised, None to use it as it is.
        input: the same of the input.
        weight_numel: weights that share one scale, over all modules that share its Parameter.
        input_numel: features of the input. LSQ counts features, not tokens, so that the gradient of a batch is the sum
            of the gradients of its parts.
        fp8_gemm: multiply the codes. Both operands must be e4m3 per tensor, both sides of the weight multiples of 16.
    """

    weight: TensorSpec | None
    input: TensorSpec | None
    weight_numel: int
    input_numel: int
    fp8_gemm: bool = False


def quant_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weight_s0: Tensor | None,
    weight_theta: Tensor | None,
    input_s0: Tensor | None,
    input_theta: Tensor | None,
    plan: Plan,
    *,
    weight_codes: Tensor | None = None,
    shared: SharedInput | None = None,
) -> Tensor:
    """``F.linear`` of quantised operands.

    Args:
        x: ``[..., in]``; zero tokens are allowed and give zero gradients, not None.
        weight, bias: ``[out, in]`` and ``[out]`` or None, in the dtype of ``x``.
        weight_s0, weight_theta, input_s0, input_theta: scales as in :func:`quant.reference.effective_scale`; None where
            not quantised or not learned.
        plan: what is quantised, and how it is computed.
        weight_codes: the weight's codes, if they are known.
        shared: what layers that read the same tensor hand each other.

    Returns:
        ``[..., out]`` in the dtype of ``x``. Gradients have their tensors' dtypes.

    Raises:
        ValueError: an s0 requires a gradient.
    """
    if any(s0 is not None and s0.requires_grad for s0 in (weight_s0, input_s0)):
        raise ValueError("weight_s0 and input_s0 are the frozen parts of the scales; train the thetas instead")
    quantized = QuantizedInput()
    if plan.input is not None:
        assert input_s0 is not None
        trains = torch.is_grad_enabled()
        trains_weight = weight.requires_grad or (weight_theta is not None and weight_theta.requires_grad)
        fixed = trains and not (input_theta is not None and input_theta.requires_grad)
        kind = (plan.fp8_gemm, fixed and trains_weight, fixed and x.requires_grad)
        with torch.no_grad():
            quantized = _quantized_input(x, input_s0, input_theta, plan.input, weight.dtype, kind, shared)
    return QuantLinearFunction.apply(
        x, weight, bias, weight_s0, weight_theta, input_s0, input_theta, *quantized, weight_codes, plan
    )


def _quantized_input(
    x: Tensor,
    s0: Tensor,
    theta: Tensor | None,
    spec: TensorSpec,
    model_dtype: torch.dtype,
    kind: tuple[bool, bool, bool],
    shared: SharedInput | None,
) -> QuantizedInput:
    fp8_gemm, keep_codes, keep_mask = kind

    def make() -> QuantizedInput:
        return quantize_input(
            x,
            s0,
            theta,
            spec,
            model_dtype,
            fp8_gemm=fp8_gemm,
            keep_codes=keep_codes,
            keep_mask=keep_mask,
        )

    return make() if shared is None else shared.get(x, kind, make)


class _Saved(NamedTuple):
    """What backward keeps, in the order of ``ctx.save_for_backward``."""

    weight: Tensor
    weight_s0: Tensor
    weight_theta: Tensor | None
    weight_codes: Tensor | None
    input_s0: Tensor
    input_theta: Tensor | None
    x: Tensor  # the input, or its codes
    mask: Tensor  # packed: which elements of a fixed-scale input were inside the range


class QuantLinearFunction(torch.autograd.Function):
    """The autograd of :func:`quant_linear`, after its input has been quantised.

    ``apply(x, weight, bias, weight_s0, weight_theta, input_s0, input_theta, values, codes, mask, weight_codes, plan)``
    with ``values, codes, mask`` a :class:`QuantizedInput`. No tensor twice: torch.compile does not take that.
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
        values: Tensor | None,
        codes: Tensor | None,
        mask: Tensor | None,
        weight_codes: Tensor | None,
        plan: Plan,
    ) -> Tensor:
        needs_weight, needs_weight_theta = ctx.needs_input_grad[1], ctx.needs_input_grad[4]
        needs_input_theta = ctx.needs_input_grad[6]
        kept_x = x if needs_weight or needs_weight_theta or needs_input_theta else None
        ctx.keeps_codes = plan.input is not None and not needs_input_theta
        if ctx.keeps_codes:
            kept_x = codes if kept_x is not None else None
        ctx.save_for_backward(weight, weight_s0, weight_theta, weight_codes, input_s0, input_theta, kept_x, mask)
        ctx.plan, ctx.input_shape = plan, x.shape
        if plan.fp8_gemm:
            assert codes is not None
            return _scaled_gemm(codes, weight, bias, weight_s0, weight_theta, input_s0, input_theta, weight_codes, plan)
        used_weight = _used_weight(weight, weight_s0, weight_theta, weight_codes, plan)
        # The operands are in the model's dtype already; autocast would hide from backward what the GEMM computed.
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x if values is None else values, used_weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        needs_x, needs_weight, needs_bias, _, needs_weight_theta, _, needs_input_theta, *_ = ctx.needs_input_grad
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
            *[None] * 5,
        )


def _used_weight(
    weight: Tensor,
    s0: Tensor,
    theta: Tensor | None,
    codes: Tensor | None,
    plan: Plan,
    *,
    after: Tensor | None = None,
) -> Tensor:
    """The weight as the GEMM in the model's dtype sees it."""
    if plan.weight is None:
        return weight
    if codes is not None:
        return kernels.dequantize(codes, s0, theta, plan.weight, weight.dtype, weight.dtype, after=after)
    return kernels.fake_quantize(weight, s0, theta, plan.weight, weight.dtype, after=after)


def _scaled_gemm(
    x_codes: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weight_s0: Tensor,
    weight_theta: Tensor | None,
    input_s0: Tensor | None,
    input_theta: Tensor | None,
    weight_codes: Tensor | None,
    plan: Plan,
) -> Tensor:
    """``(x_codes @ weight_codes.t()) * input_scale * weight_scale + bias`` on the fp8 tensor cores."""
    assert plan.weight is not None and plan.input is not None and input_s0 is not None
    if weight_codes is None:
        weight_codes, _ = kernels.quantize(weight, weight_s0, weight_theta, plan.weight, weight.dtype)
    output_shape = (*x_codes.shape[:-1], weight.shape[0])
    if x_codes.numel() == 0:  # an expert that no token chose
        return weight.new_zeros(output_shape)
    # Without "fast accumulation" partial sums are kept in fp32, as in the bf16 GEMM that this replaces.
    output = torch._scaled_mm(
        x_codes.reshape(-1, x_codes.shape[-1]),
        weight_codes.t(),
        scale_a=kernels.effective_scale(input_s0, input_theta, plan.input, weight.dtype),
        scale_b=kernels.effective_scale(weight_s0, weight_theta, plan.weight, weight.dtype),
        bias=bias,
        out_dtype=weight.dtype,
        use_fast_accum=False,
    )
    return output.reshape(output_shape)


def _input_gradients(ctx: Any, saved: _Saved, grad: Tensor) -> tuple[Tensor, Tensor | None]:
    """Gradients of the input ``[..., in]`` and of its theta from ``grad [tokens, out]``."""
    plan: Plan = ctx.plan
    used_weight = _used_weight(saved.weight, saved.weight_s0, saved.weight_theta, saved.weight_codes, plan, after=grad)
    grad_used = (grad @ used_weight).reshape(ctx.input_shape)
    if plan.input is None:
        return grad_used, None
    if ctx.keeps_codes:
        return kernels.masked_(grad_used, saved.mask), None
    grad_theta = kernels.fake_quantize_backward_(
        grad_used,
        saved.x,
        saved.input_s0,
        saved.input_theta,
        plan.input,
        saved.weight.dtype,
        factor=_lsq_factor(plan.input_numel, plan.input),
        theta_gradient=True,
    )
    return grad_used, grad_theta


def _weight_gradients(ctx: Any, saved: _Saved, grad: Tensor) -> tuple[Tensor, Tensor | None]:
    """Gradients of the weight ``[out, in]`` and of its theta from ``grad [tokens, out]``."""
    plan: Plan = ctx.plan
    dtype = saved.weight.dtype
    used_x = saved.x
    if plan.input is not None:
        scale = (saved.input_s0, saved.input_theta, plan.input, dtype)
        used_x = (
            kernels.dequantize(saved.x, *scale, dtype, after=grad)
            if ctx.keeps_codes
            else kernels.fake_quantize(saved.x, *scale, after=grad)
        )
    grad_used = grad.t() @ used_x.reshape(-1, used_x.shape[-1])
    if plan.weight is None:
        return grad_used, None
    grad_theta = kernels.fake_quantize_backward_(
        grad_used,
        saved.weight,
        saved.weight_s0,
        saved.weight_theta,
        plan.weight,
        dtype,
        factor=_lsq_factor(plan.weight_numel, plan.weight),
        theta_gradient=ctx.needs_input_grad[4],
    )
    return grad_used, grad_theta


def _lsq_factor(numel: int, spec: TensorSpec) -> float:
    """LSQ's gradient scale (Esser et al. 2020, section 2.2): ``1/sqrt(numel * qmax)``."""
    return 1 / math.sqrt(numel * spec.qmax)
