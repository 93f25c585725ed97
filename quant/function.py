"""A Linear with quantised operands, and its gradients: one function, computed in one of two ways.

*simulate* multiplies fake-quantised operands in the model's dtype, ``F.linear(fq(x), fq(weight), bias)``; *fp8_gemm*
multiplies the codes on the fp8 tensor cores and the result by both scales. Backward is the same for both: GEMMs of the
dequantised operands in the model's dtype.

What is kept for backward decides whether this can train a model that no device holds: a fake-quantised weight is not a
leaf, so plain autograd keeps the whole tensor alive and defeats ZeRO-3. This function therefore saves

* the weight **Parameter** (under ZeRO-3 the gathered one comes back in backward) and quantises it again, unless its
  codes are kept anyway because the weight stays resident,
* the scale Parameters, a few bytes,
* of the input: the 1-byte codes and a 1-bit mask of what was not clipped, when its scale is stored and does not learn;
  the input itself otherwise. Layers that read the same tensor share one copy of it.

Nothing is saved or computed for an operand that needs no gradient.
"""

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from quant import gemm, kernels
from quant.inputs import QuantizedInput, SharedInput, quantize_input
from quant.spec import TensorSpec
from quant.weight_scale import WeightScale


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
    weight_global: Tensor | None = None,
    weight_zero: Tensor | None = None,
    weight_codes: Tensor | None = None,
    shared: SharedInput | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """``F.linear`` of quantised operands.

    Args:
        x: ``[..., in]``; zero tokens are allowed and give zero gradients, not None.
        weight, bias: ``[out, in]`` and ``[out]`` or None, in the dtype of ``x``; or a stack ``[E, out, in]`` and None.
        weight_s0, weight_theta, input_s0, input_theta: scales as in :func:`quant.reference.effective_scale`; None where
            not quantised or not learned.
        plan: what is quantised, and how it is computed.
        weight_global: the global scale of the weight's, likewise.
        weight_zero: the weight's zero points, fp32 in the shape of its scale; None where it is symmetric.
        weight_codes: the weight's codes, if they are known.
        shared: what layers that read the same tensor hand each other.
        offsets: of a stack, where the rows of each expert end, see :mod:`quant.gemm`.

    Returns:
        ``[..., out]`` in the dtype of ``x``. Gradients have their tensors' dtypes.

    Raises:
        ValueError: an s0 requires a gradient.
    """
    if any(s0 is not None and s0.requires_grad for s0 in (weight_s0, input_s0)):
        raise ValueError("weight_s0 and input_s0 are the frozen parts of the scales; train the thetas instead")
    quantized = QuantizedInput()
    if plan.input is not None:
        trains = torch.is_grad_enabled()
        trains_weight = weight.requires_grad or (weight_theta is not None and weight_theta.requires_grad)
        learns = input_theta is not None and input_theta.requires_grad
        fixed = trains and not learns and not plan.input.dynamic
        kind = (plan.fp8_gemm, fixed and trains_weight, fixed and x.requires_grad)
        with torch.no_grad():
            quantized = _quantized_input(x, input_s0, input_theta, plan.input, weight.dtype, kind, shared)
    return QuantLinearFunction.apply(
        x,
        weight,
        bias,
        weight_s0,
        weight_theta,
        weight_global,
        input_s0,
        input_theta,
        *quantized,
        weight_codes,
        weight_zero,
        offsets,
        plan,
    )


def _quantized_input(
    x: Tensor,
    s0: Tensor | None,
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
    weight_global: Tensor | None
    weight_codes: Tensor | None
    weight_zero: Tensor | None
    input_s0: Tensor
    input_theta: Tensor | None
    x: Tensor  # the input, or its codes
    mask: Tensor  # packed: which elements of an input were inside the range, where its codes are kept
    offsets: Tensor | None

    def weight_scale(self, spec: TensorSpec) -> WeightScale:
        return WeightScale(
            self.weight_s0, self.weight_theta, self.weight_global, spec, self.weight.dtype, self.weight_zero
        )


class QuantLinearFunction(torch.autograd.Function):
    """The autograd of :func:`quant_linear`, after its input has been quantised.

    ``values, codes, mask`` is a :class:`QuantizedInput`. No tensor comes twice: torch.compile does not take that.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        weight_s0: Tensor,
        weight_theta: Tensor | None,
        weight_global: Tensor | None,
        input_s0: Tensor | None,
        input_theta: Tensor | None,
        values: Tensor | None,
        codes: Tensor | None,
        mask: Tensor | None,
        weight_codes: Tensor | None,
        weight_zero: Tensor | None,
        offsets: Tensor | None,
        plan: Plan,
    ) -> Tensor:
        needs_x, needs_weight, needs_weight_theta = (ctx.needs_input_grad[i] for i in (0, 1, 4))
        needs_input_theta = ctx.needs_input_grad[7]
        dynamic = plan.input is not None and plan.input.dynamic
        ctx.keeps_codes = plan.input is not None and not dynamic and not needs_input_theta
        kept_x = codes if ctx.keeps_codes else x
        # The range of a dynamic grid comes from the input, and with it which elements have a gradient.
        if not (needs_weight or needs_weight_theta or needs_input_theta or (dynamic and needs_x)):
            kept_x = None
        scales = (weight_s0, weight_theta, weight_global)
        ctx.save_for_backward(weight, *scales, weight_codes, weight_zero, input_s0, input_theta, kept_x, mask, offsets)
        ctx.plan, ctx.input_shape = plan, x.shape
        scale = None
        if plan.weight is not None:
            scale = WeightScale(*scales, plan.weight, weight.dtype, weight_zero)
        if plan.fp8_gemm:
            assert scale is not None and codes is not None and plan.input is not None and input_s0 is not None
            input_scale = kernels.effective_scale(input_s0, input_theta, plan.input, weight.dtype)
            if weight_codes is None:
                weight_codes = scale.quantize(weight)
            return gemm.scaled_linear(codes, input_scale, weight_codes, scale.effective(), bias, weight.dtype, offsets)
        used_weight = _used_weight(weight, scale, weight_codes)
        # The operands are in the model's dtype already; autocast would hide from backward what the GEMM computed. It
        # knows no meta device, on which nothing is computed.
        device = x.device.type
        autocast = device != "meta" and torch.is_autocast_enabled(device)
        with torch.autocast(device, enabled=False) if autocast else nullcontext():
            return gemm.linear(x if values is None else values, used_weight, bias, offsets)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        needs_x, needs_weight, needs_bias, _, needs_weight_theta, _, _, needs_input_theta, *_ = ctx.needs_input_grad
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
            None,
            grad_input_theta,
            *[None] * 7,
        )


def _used_weight(
    weight: Tensor, scale: WeightScale | None, codes: Tensor | None, *, after: Tensor | None = None
) -> Tensor:
    """The weight as the GEMM in the model's dtype sees it."""
    if scale is None:
        return weight
    return scale.fake_quantize(weight, after=after) if codes is None else scale.dequantize(codes, after=after)


def _input_gradients(ctx: Any, saved: _Saved, grad: Tensor) -> tuple[Tensor, Tensor | None]:
    """Gradients of the input ``[..., in]`` and of its theta from ``grad [tokens, out]``."""
    plan: Plan = ctx.plan
    scale = None if plan.weight is None else saved.weight_scale(plan.weight)
    used_weight = _used_weight(saved.weight, scale, saved.weight_codes, after=grad)
    grad_used = gemm.input_gradient(grad, used_weight, saved.offsets).reshape(ctx.input_shape)
    if plan.input is None:
        return grad_used, None
    if plan.input.dynamic:
        return kernels.fake_quantize_tokens_backward(grad_used, saved.x, plan.input), None
    if ctx.keeps_codes:
        return kernels.masked_(grad_used, saved.mask), None
    grad_theta = kernels.fake_quantize_backward_(
        grad_used,
        saved.x,
        saved.input_s0,
        saved.input_theta,
        plan.input,
        saved.weight.dtype,
        factor=lsq_factor(plan.input_numel, plan.input),
        theta_gradient=True,
    )
    return grad_used, grad_theta


def _weight_gradients(ctx: Any, saved: _Saved, grad: Tensor) -> tuple[Tensor, Tensor | None]:
    """Gradients of the weight, in its shape, and of its theta from ``grad [tokens, out]``."""
    plan: Plan = ctx.plan
    used_x = _used_input(ctx, saved, after=grad)
    grad_used = gemm.weight_gradient(grad, used_x.reshape(-1, used_x.shape[-1]), saved.offsets)
    if plan.weight is None:
        return grad_used, None
    grad_theta = saved.weight_scale(plan.weight).backward_(
        grad_used,
        saved.weight,
        factor=lsq_factor(plan.weight_numel, plan.weight),
        theta_gradient=ctx.needs_input_grad[4],
    )
    return grad_used, grad_theta


def _used_input(ctx: Any, saved: _Saved, *, after: Tensor) -> Tensor:
    """The input as the forward's GEMM saw it, from what was kept of it."""
    spec: TensorSpec | None = ctx.plan.input
    if spec is None:
        return saved.x
    if spec.dynamic:
        return kernels.fake_quantize_tokens(saved.x, spec, after=after)
    dtype = saved.weight.dtype
    scale = (saved.input_s0, saved.input_theta, spec, dtype)
    if ctx.keeps_codes:
        return kernels.dequantize(saved.x, *scale, dtype, after=after)
    return kernels.fake_quantize(saved.x, *scale, after=after)


class UsedWeightFunction(torch.autograd.Function):
    """A fake-quantised weight by itself, for a layer whose product is not a plain GEMM. The caller holds the copy.

    ``apply(weight, weight_s0, weight_theta, weight_global, spec, numel, weight_zero)``; saves the Parameters.
    """

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        s0: Tensor,
        theta: Tensor | None,
        global_scale: Tensor | None,
        spec: TensorSpec,
        numel: int,
        zero: Tensor | None = None,
    ) -> Tensor:
        ctx.save_for_backward(weight, s0, theta, global_scale, zero)
        ctx.spec, ctx.factor = spec, lsq_factor(numel, spec)
        return WeightScale(s0, theta, global_scale, spec, weight.dtype, zero).fake_quantize(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, s0, theta, global_scale, zero = ctx.saved_tensors
        grad_weight = grad.clone(memory_format=torch.contiguous_format)
        grad_theta = WeightScale(s0, theta, global_scale, ctx.spec, weight.dtype, zero).backward_(
            grad_weight, weight, factor=ctx.factor, theta_gradient=ctx.needs_input_grad[2]
        )
        return grad_weight if ctx.needs_input_grad[0] else None, None, grad_theta, *[None] * 4


def lsq_factor(numel: int, spec: TensorSpec) -> float:
    """LSQ's gradient scale (Esser et al. 2020, section 2.2): ``1/sqrt(numel * qmax)``."""
    return 1 / math.sqrt(numel * spec.qmax)
