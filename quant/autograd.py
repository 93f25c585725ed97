"""A Linear with quantized operands, and its gradients: one function, computed in one of two ways.

*simulate* multiplies fake-quantized operands in the model's dtype, ``F.linear(fq(x), fq(weight), bias)``; *fp8_gemm*
multiplies the codes on the fp8 tensor cores and the result by both scales. Backward is the same for both: GEMMs of the
dequantized operands in the model's dtype.

What is kept for backward decides whether this can train a model that no device holds: a fake-quantized weight is not a
leaf, so plain autograd keeps the whole tensor alive and defeats ZeRO-3. This function therefore saves

* the weight **Parameter** (under ZeRO-3 the gathered one comes back in backward) and quantizes it again, unless its
  codes are kept anyway because the weight stays resident,
* the scale Parameters, a few bytes,
* of the input: the 1-byte codes and a 1-bit mask of what was not clipped, when its scale is stored and does not learn;
  of dynamic floats, where that is wanted, packed codes and scales (:func:`quant.kernels.keep_tokens`); the input itself
  otherwise, and where attention keeps it anyway (:mod:`quant.inputs`). Layers that read the same tensor
  share one copy of it.

Nothing is saved or computed for an operand that needs no gradient.

The weight of a layer whose product is no plain GEMM, such as lm_head: fake-quantized by itself, differentiable.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from quant import gemm, kernels
from quant.inputs import QuantizedInput, Restored, SharedInput, Wanted, mask_, quantize_input, used_input
from quant.packed_weight import PackedCodes, codes_of_placeholder, is_placeholder
from quant.scale import Quantizer, Scale, lsq_factor
from quant.spec import TensorSpec


@dataclass(frozen=True)
class Plan:
    """What :func:`quant_linear` does with each operand.

    Attributes:
        weight: how the weight is quantized, None to use it as it is.
        input: the same of the input.
        weight_numel: weights that share one scale, over all modules that share its Parameter.
        input_numel: features of the input. LSQ counts features, not tokens, so that the gradient of a batch is the sum
            of the gradients of its parts.
        fp8_gemm: multiply the codes. Both operands must be e4m3 per tensor, both sides of the weight multiples of 16.
        fast_accum: of the fp8 GEMM, as in :func:`quant.gemm.scaled_linear`.
        held: how ``weight`` holds codes, where it does; it is quantized then, and frozen.
        restored: where layers with the same input find it in backward, as the forward multiplied it.
        dynamic_codes: keep codes for backward also of floats with dynamic scales: less memory, decoded in backward.
        weight_scale: the effective scale of the weight for the fp8 GEMM, if it is known.
    """

    weight: TensorSpec | None
    input: TensorSpec | None
    weight_numel: int
    input_numel: int
    fp8_gemm: bool = False
    fast_accum: bool = False
    held: PackedCodes | None = None
    restored: Restored | None = None
    dynamic_codes: bool = False
    weight_scale: Tensor | None = None


def quant_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    weight_scale: Scale | None,
    input_scale: Scale | None,
    plan: Plan,
    *,
    weight_codes: Tensor | None = None,
    shared: SharedInput | None = None,
    offsets: Tensor | None = None,
    apply: Callable[..., Tensor] | None = None,
) -> Tensor:
    """``F.linear`` of quantized operands.

    Args:
        x: ``[..., in]``; zero tokens are allowed and give zero gradients, not None.
        weight, bias: ``[out, in]`` and ``[out]`` or None, in the dtype of ``x``; or a stack ``[E, out, in]`` and None.
        weight_scale, input_scale: of both; None where none is stored. One whose theta trains is given also where the
            operand is not quantized: its gradient is zeros then.
        plan: what is quantized, and how it is computed.
        weight_codes: the weight's codes, if they are known.
        shared: what layers that read the same tensor hand each other.
        offsets: of a stack, where the rows of each expert end, see :mod:`quant.gemm`.
        apply: that of a weight with an adapter, which trains (:mod:`quant.lora`), instead of the Function's below.

    Returns:
        ``[..., out]`` in the dtype of ``x``. Gradients have their tensors' dtypes.

    Raises:
        ValueError: an s0 requires a gradient.
    """
    if any(scale is not None and scale.s0.requires_grad for scale in (weight_scale, input_scale)):
        raise ValueError("weight_s0 and input_s0 are the frozen parts of the scales; train the thetas instead")
    quantized = QuantizedInput()
    spec = plan.input
    if spec is not None:
        dynamic = spec.dynamic and not plan.dynamic_codes
        fixed = torch.is_grad_enabled() and not _learns(input_scale) and not dynamic
        trains_weight = weight.requires_grad or _learns(weight_scale) or apply is not None
        wanted = Wanted(plan.fp8_gemm, codes=fixed and trains_weight, mask=fixed and x.requires_grad)
        with torch.no_grad():
            make = partial(quantize_input, x, input_scale, spec, weight.dtype, wanted)
            if shared is None:
                quantized = make()
            else:
                quantized, restored = shared.get(x, wanted, make)
                plan = replace(plan, restored=restored)
    no_scale = (None,) * len(Scale._fields)
    input_s0, input_theta, *_ = input_scale or no_scale
    return (apply or apply_function)(
        plan, x, weight, bias, *(weight_scale or no_scale), input_s0, input_theta, *quantized, weight_codes, offsets
    )


def apply_function(plan: Plan, *tensors: Tensor | None) -> Tensor:
    """The product of :func:`quant_linear` of a quantized input, with its gradients; ``tensors`` are :class:`Arguments`.

    What backward keeps is kept before the product is computed: where activations are recomputed, a layer that runs last
    is not multiplied a second time, since torch stops when all that backward keeps is there again.
    """
    if not torch.is_grad_enabled():
        return product(plan, Arguments(*tensors))
    output: Tensor = _ProductFunction.apply(QuantLinearFunction.apply(plan, *tensors), plan, *tensors)
    return output


def _learns(scale: Scale | None) -> bool:
    return scale is not None and scale.theta is not None and scale.theta.requires_grad


class Arguments(NamedTuple):
    """The tensors that :class:`QuantLinearFunction` takes after its plan, and in this order their gradients.

    ``values, codes, mask, scales`` is a :class:`quant.inputs.QuantizedInput`.
    """

    x: Any
    weight: Any
    bias: Any
    weight_s0: Any
    weight_theta: Any
    weight_global: Any
    weight_zero: Any
    input_s0: Any
    input_theta: Any
    values: Any
    codes: Any
    mask: Any
    scales: Any
    weight_codes: Any
    offsets: Any


class Saved(NamedTuple):
    """What backward keeps, in the order of ``ctx.save_for_backward``."""

    weight: Tensor
    weight_s0: Tensor
    weight_theta: Tensor | None
    weight_global: Tensor | None
    weight_zero: Tensor | None
    weight_codes: Tensor | None
    input_s0: Tensor
    input_theta: Tensor | None
    x: Tensor  # the input, or its codes
    mask: Tensor  # packed: which elements of an input were inside the range, where its codes are kept; else None
    scales: Tensor | None  # of the codes of a dynamic input
    offsets: Tensor | None

    @classmethod
    def of(cls, given: Arguments) -> "Saved":
        """All that may be kept of the arguments, with the input itself."""
        scale = (given.weight_s0, given.weight_theta, given.weight_global, given.weight_zero)
        inputs = (given.input_s0, given.input_theta, given.x, given.mask, given.scales)
        return cls(given.weight, *scale, given.weight_codes, *inputs, given.offsets)

    def weight_quantizer(self, spec: TensorSpec) -> Quantizer:
        scale = Scale(self.weight_s0, self.weight_theta, self.weight_global, self.weight_zero)
        return Quantizer(scale, spec, self.weight.dtype)

    def unpacked(self, plan: Plan) -> "Saved":
        """With the codes that the weight holds, or that stand in for it."""
        if plan.held is not None:
            return self._replace(weight_codes=plan.held.unpack(self.weight))
        if plan.weight is None or not is_placeholder(self.weight):
            return self
        return self._replace(weight_codes=codes_of_placeholder(self.weight, plan.weight))

    def input_quantizer(self, spec: TensorSpec) -> Quantizer:
        return Quantizer(Scale(self.input_s0, self.input_theta), spec, self.weight.dtype)


class QuantLinearFunction(torch.autograd.Function):
    """What :func:`apply_function` keeps for backward, and its gradients.

    ``apply(plan, *Arguments)`` gives a tensor of the output's shape without values or memory, for
    :class:`_ProductFunction` to compute. No tensor comes twice: torch.compile does not take that.
    """

    @staticmethod
    def forward(ctx: Any, plan: Plan, *tensors: Tensor | None) -> Tensor:
        given = Arguments(*tensors)
        ctx.save_for_backward(*keep(ctx, plan, given, Arguments(*ctx.needs_input_grad[1:])))
        out_features = given.weight.shape[-2]
        return given.x.new_empty(()).expand(*given.x.shape[:-1], out_features)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        needs = Arguments(*ctx.needs_input_grad[1:])
        saved = Saved(*ctx.saved_tensors).unpacked(ctx.plan)  # once: activation checkpointing drops what was asked for
        grad = grad_output.reshape(-1, grad_output.shape[-1])  # [tokens, out]
        grad_x = grad_input_theta = grad_weight = grad_weight_theta = zeros = None
        if needs.x or (needs.input_theta and ctx.plan.input is not None):
            grad_x, grad_input_theta, zeros = _input_gradients(ctx, saved, grad, needs.weight_theta)
        masked = (ctx.keeps_codes and saved.mask is not None) or (ctx.plan.input is not None and ctx.plan.input.dynamic)
        unmasked = grad_x if masked and saved.scales is None else None
        if needs.weight or (needs.weight_theta and ctx.plan.weight is not None):
            used_x = used_input(ctx, saved, unmasked, after=grad)
            grad_weight, grad_weight_theta = _weight_gradients(ctx, saved, grad, used_x, needs.weight_theta)
        elif unmasked is not None:
            mask_(ctx, saved, unmasked)
        # The theta of an operand that is not quantized now: ZeRO-3 keeps the gradient of the last step of a Parameter
        # that gets none, and would apply it again in every step.
        if saved.input_theta is not None and needs.input_theta and grad_input_theta is None:
            grad_input_theta = torch.zeros_like(saved.input_theta)
        if saved.weight_theta is not None and needs.weight_theta and grad_weight_theta is None:
            grad_weight_theta = torch.zeros_like(saved.weight_theta) if zeros is None else zeros
        gradients = Arguments(*[None] * len(Arguments._fields))._replace(
            x=grad_x if needs.x else None,
            weight=grad_weight if needs.weight else None,
            bias=grad.sum(0) if needs.bias else None,
            weight_theta=grad_weight_theta,
            input_theta=grad_input_theta,
        )
        return None, *gradients


class _ProductFunction(torch.autograd.Function):
    """Computes what :class:`QuantLinearFunction` stands for: ``apply(that, plan, *Arguments)``. It keeps nothing."""

    @staticmethod
    def forward(ctx: Any, placeholder: Tensor, plan: Plan, *tensors: Tensor | None) -> Tensor:
        return product(plan, Arguments(*tensors))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, *[None] * len(Arguments._fields)


def keep(ctx: Any, plan: Plan, given: Arguments, needs: Arguments) -> Saved:
    """What backward keeps of the arguments, of which those that ``needs`` names need gradients."""
    dynamic = plan.input is not None and plan.input.dynamic
    stored = plan.input is not None and not dynamic and not needs.input_theta
    ctx.keeps_codes = stored or given.scales is not None
    kept_x = given.codes if ctx.keeps_codes else given.x
    # The range of a dynamic grid comes from the input, and with it which elements have a gradient.
    from_x = dynamic and not ctx.keeps_codes and needs.x
    if not (needs.weight or needs.weight_theta or needs.input_theta or from_x):
        kept_x = None
    ctx.plan, ctx.input_shape = plan, given.x.shape
    if plan.restored is not None and (needs.weight or needs.weight_theta):
        plan.restored.layers += 1
    return Saved.of(given)._replace(x=kept_x)


def product(plan: Plan, given: Arguments) -> Tensor:
    """``[..., out]``, without a gradient; see :func:`quant_linear`."""
    saved = Saved.of(given).unpacked(plan)
    if plan.fp8_gemm:
        return _product_of_codes(plan, saved, given)
    quantizer = None if plan.weight is None else saved.weight_quantizer(plan.weight)
    used = used_weight(given.weight, quantizer, saved.weight_codes)
    # The operands are in the model's dtype already; autocast would hide from backward what the GEMM computed. It
    # knows no meta device, on which nothing is computed.
    device = given.x.device.type
    autocast = device != "meta" and torch.is_autocast_enabled(device)
    with torch.autocast(device, enabled=False) if autocast else nullcontext():
        return gemm.linear(given.x if given.values is None else given.values, used, given.bias, given.offsets)


def _product_of_codes(plan: Plan, saved: Saved, given: Arguments) -> Tensor:
    """The GEMM of the codes of both operands, scaled."""
    assert plan.weight is not None and plan.input is not None
    quantizer, codes, bias = saved.weight_quantizer(plan.weight), given.codes, given.bias
    input_scale = kernels.effective_scale(saved.input_quantizer(plan.input))
    weight_codes, weight_scale = saved.weight_codes, plan.weight_scale
    if weight_codes is None:
        weight_codes, weight_scale = kernels.quantize_with_scale(saved.weight, quantizer)
    elif weight_scale is None:
        weight_scale = kernels.effective_scale(quantizer)
    scales_and_codes = (codes, input_scale, weight_codes, weight_scale)
    dtype, offsets = saved.weight.dtype, saved.offsets
    return gemm.scaled_linear(*scales_and_codes, bias, dtype, offsets, fast_accum=plan.fast_accum)


def used_weight(
    weight: Tensor, quantizer: Quantizer | None, codes: Tensor | None, *, after: Tensor | None = None
) -> Tensor:
    """The weight as the GEMM in the model's dtype sees it."""
    if quantizer is None:
        return weight
    if codes is None:
        return kernels.fake_quantize(weight, quantizer, after=after)
    return kernels.dequantize(codes, quantizer, after=after)


def _input_gradients(ctx: Any, saved: Saved, grad: Tensor, wanted: bool) -> tuple[Tensor | None, ...]:
    """Gradients of the input ``[..., in]``, not masked yet where :func:`mask_` does it, and of its theta, from
    ``grad [tokens, out]``; and zeros like the weight's theta, if these are ``wanted`` and cost no launch."""
    plan, zeros = ctx.plan, None
    quantizer = None if plan.weight is None else saved.weight_quantizer(plan.weight)
    if quantizer is not None and wanted and saved.weight_codes is not None and is_placeholder(saved.weight):
        used, zeros = kernels.dequantize_with_zeros(saved.weight_codes, quantizer, after=grad)
    else:
        used = used_weight(saved.weight, quantizer, saved.weight_codes, after=grad)
    grad_used = gemm.input_gradient(grad, used, saved.offsets).reshape(ctx.input_shape)
    if saved.scales is not None:
        return kernels.kept_gradient_(grad_used, saved.scales, saved.mask), None, zeros
    if plan.input is None or ctx.keeps_codes or plan.input.dynamic:
        return grad_used, None, zeros
    of_input, factor = saved.input_quantizer(plan.input), lsq_factor(plan.input_numel, plan.input)
    of_theta = kernels.fake_quantize_backward_(grad_used, saved.x, of_input, factor=factor, theta_gradient=True)
    return grad_used, of_theta, zeros


def _weight_gradients(
    ctx: Any, saved: Saved, grad: Tensor, used_x: Tensor, theta_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Gradients of the weight, in its shape, and of its theta where wanted, from ``grad [tokens, out]``."""
    plan: Plan = ctx.plan
    grad_used = gemm.weight_gradient(grad, used_x.reshape(-1, used_x.shape[-1]), saved.offsets)
    if plan.weight is None or is_placeholder(saved.weight):
        # Of codes that stand in for the weight, whoever has the weight itself does the rest
        # (:mod:`model.zero.quantized_gather`).
        return grad_used, None
    quantizer = saved.weight_quantizer(plan.weight)
    how: dict[str, Any] = {"factor": lsq_factor(plan.weight_numel, plan.weight), "theta_gradient": theta_gradient}
    return grad_used, kernels.fake_quantize_backward_(grad_used, saved.weight, quantizer, **how, of_weight=True)


class UsedWeightFunction(torch.autograd.Function):
    """Fake-quantizes a weight for a layer whose product is not a plain GEMM. The caller holds the fake-quantized copy.

    ``apply(spec, numel, weight, *scale)``, where ``numel`` weights share one scale. It saves the Parameters.
    """

    @staticmethod
    def forward(ctx: Any, spec: TensorSpec, numel: int, weight: Tensor, *scale: Any) -> Tensor:
        ctx.save_for_backward(weight, *scale)
        ctx.spec, ctx.factor = spec, lsq_factor(numel, spec)
        codes = codes_of_placeholder(weight, spec) if is_placeholder(weight) else None
        return used_weight(weight, Quantizer(Scale(*scale), spec, weight.dtype), codes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _, _, needs_weight, _, needs_theta, *_ = ctx.needs_input_grad
        weight, *scale = ctx.saved_tensors
        grad_weight = grad.clone(memory_format=torch.contiguous_format)
        if is_placeholder(weight):  # as above
            grad_theta = torch.zeros_like(scale[1]) if needs_theta else None
            return None, None, grad_weight if needs_weight else None, None, grad_theta, None, None
        quantizer = Quantizer(Scale(*scale), ctx.spec, weight.dtype)
        grad_theta = kernels.fake_quantize_backward_(
            grad_weight, weight, quantizer, factor=ctx.factor, theta_gradient=needs_theta, of_weight=True
        )
        return None, None, grad_weight if needs_weight else None, None, grad_theta, None, None
