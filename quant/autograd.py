"""Linear with quantized operands and its gradients: one autograd function with two methods of computation.

*simulate* multiplies fake-quantized operands in the model's dtype, ``F.linear(fq(x), fq(weight), bias)``; *fp8_gemm*
multiplies the codes on fp8 tensor cores and the result by both scales. Backward is the same for both: GEMMs of the
dequantized operands in the model's dtype.

A fake-quantized weight is not a leaf, so plain autograd would keep the whole tensor for backward and defeat ZeRO-3.
This function therefore saves

* the weight **Parameter** (ZeRO-3 gathers it again in backward), and quantizes it again unless its codes are kept
  because the weight stays resident,
* the scale Parameters, a few bytes,
* the input, in one of three forms: 1-byte codes and a 1-bit mask of the unclipped elements if its scale is stored and
  does not learn; packed codes and scales (:func:`quant.kernels.keep_tokens`) for floats with dynamic scales and
  ``dynamic_codes``; otherwise, and if attention keeps the input anyway (:mod:`quant.inputs`), the input itself. Layers
  that read the same tensor share one copy.

Nothing is saved or computed for an operand that needs no gradient.

:class:`UsedWeightFunction` fake-quantizes only the weight, for a layer whose product is not a plain GEMM, such as
lm_head.
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
    """Formats and options of :func:`quant_linear` for each operand.

    Attributes:
        weight: format of the weight; None leaves it unquantized.
        input: format of the input; None leaves it unquantized.
        weight_numel: number of weights that share one scale, over all modules that share its Parameter.
        input_numel: features of the input. LSQ counts features, not tokens, so that the gradient of a batch is the sum
            of the gradients of its parts.
        fp8_gemm: multiply the codes. Both operands must be e4m3 per tensor, both sides of the weight multiples of 16.
        fast_accum: option of the fp8 GEMM, as in :func:`quant.gemm.scaled_linear`.
        held: layout of the codes if ``weight`` is a packed weight, which is frozen and always quantized; else None.
        restored: cache, for backward, of the input as the forward multiplied it, shared by layers with the same input.
        dynamic_codes: for floats with dynamic scales, too, save the input's codes for backward. They need less memory
            and are decoded in backward.
        weight_scale: precomputed effective scale of the weight for the fp8 GEMM, or None.
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
    """Compute ``F.linear`` of quantized operands.

    Args:
        x: ``[..., in]``; zero tokens are allowed and result in zero gradients, not None.
        weight, bias: ``[out, in]`` and ``[out]`` or None, in the dtype of ``x``; or a stack ``[E, out, in]`` and None.
        weight_scale, input_scale: None if none is stored. A scale whose theta trains is passed even if the operand is
            not quantized: its gradient is then zeros.
        plan: which operands are quantized, and how the product is computed.
        weight_codes: the weight's codes, if already computed.
        shared: cache of the quantized input for layers that read the same tensor.
        offsets: for a stack, the row ends of the experts, see :mod:`quant.gemm`.
        apply: replaces :func:`apply_function` for a weight with an adapter that trains (:mod:`quant.lora`).

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
    """Compute the product of :func:`quant_linear`, differentiable; ``tensors`` are :class:`Arguments`.

    Tensors are saved for backward before the product is computed: with activation checkpointing, the last layer is then
    not multiplied again, as torch stops the recomputation when all saved tensors are back.
    """
    if not torch.is_grad_enabled():
        return product(plan, Arguments(*tensors))
    output: Tensor = _ProductFunction.apply(QuantLinearFunction.apply(plan, *tensors), plan, *tensors)
    return output


def _learns(scale: Scale | None) -> bool:
    return scale is not None and scale.theta is not None and scale.theta.requires_grad


class Arguments(NamedTuple):
    """Tensor arguments of :class:`QuantLinearFunction` after its plan, and the order of their gradients.

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
    """Tensors saved for backward, in the order of ``ctx.save_for_backward``."""

    weight: Tensor
    weight_s0: Tensor
    weight_theta: Tensor | None
    weight_global: Tensor | None
    weight_zero: Tensor | None
    weight_codes: Tensor | None
    input_s0: Tensor
    input_theta: Tensor | None
    x: Tensor  # the input, or its codes
    mask: Tensor  # packed bits, 1 inside the range, if the input's codes are saved; else None
    scales: Tensor | None  # scales of a dynamic input's codes
    offsets: Tensor | None

    @classmethod
    def of(cls, given: Arguments) -> "Saved":
        """Collect all arguments that may be saved, with the input itself instead of its codes."""
        scale = (given.weight_s0, given.weight_theta, given.weight_global, given.weight_zero)
        inputs = (given.input_s0, given.input_theta, given.x, given.mask, given.scales)
        return cls(given.weight, *scale, given.weight_codes, *inputs, given.offsets)

    def weight_quantizer(self, spec: TensorSpec) -> Quantizer:
        scale = Scale(self.weight_s0, self.weight_theta, self.weight_global, self.weight_zero)
        return Quantizer(scale, spec, self.weight.dtype)

    def unpacked(self, plan: Plan) -> "Saved":
        """Add the codes stored in the weight (packed weight or placeholder)."""
        if plan.held is not None:
            return self._replace(weight_codes=plan.held.unpack(self.weight))
        if plan.weight is None or not is_placeholder(self.weight):
            return self
        return self._replace(weight_codes=codes_of_placeholder(self.weight, plan.weight))

    def input_quantizer(self, spec: TensorSpec) -> Quantizer:
        return Quantizer(Scale(self.input_s0, self.input_theta), spec, self.weight.dtype)


class QuantLinearFunction(torch.autograd.Function):
    """Save the tensors for backward and compute the gradients of :func:`apply_function`.

    ``apply(plan, *Arguments)`` returns a tensor of the output's shape without values or memory;
    :class:`_ProductFunction` then computes the output. No tensor is passed twice, which torch.compile would not accept.
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
        saved = Saved(*ctx.saved_tensors).unpacked(ctx.plan)  # once: activation checkpointing frees on access
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
        # A theta whose operand is not quantized now gets zeros: under ZeRO-3 a Parameter without a gradient would get
        # its last gradient again, in every step.
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
    """Compute the output for :class:`QuantLinearFunction`: ``apply(its placeholder, plan, *Arguments)``. Saves
    nothing."""

    @staticmethod
    def forward(ctx: Any, placeholder: Tensor, plan: Plan, *tensors: Tensor | None) -> Tensor:
        return product(plan, Arguments(*tensors))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, *[None] * len(Arguments._fields)


def keep(ctx: Any, plan: Plan, given: Arguments, needs: Arguments) -> Saved:
    """Select the tensors to save for backward; ``needs`` has True for arguments that need a gradient."""
    dynamic = plan.input is not None and plan.input.dynamic
    stored = plan.input is not None and not dynamic and not needs.input_theta
    ctx.keeps_codes = stored or given.scales is not None
    kept_x = given.codes if ctx.keeps_codes else given.x
    # The range of a dynamic grid, and so the mask of the gradient, is computed from the input.
    from_x = dynamic and not ctx.keeps_codes and needs.x
    if not (needs.weight or needs.weight_theta or needs.input_theta or from_x):
        kept_x = None
    ctx.plan, ctx.input_shape = plan, given.x.shape
    if plan.restored is not None and (needs.weight or needs.weight_theta):
        plan.restored.layers += 1
    return Saved.of(given)._replace(x=kept_x)


def product(plan: Plan, given: Arguments) -> Tensor:
    """Compute ``[..., out]``, without a gradient; see :func:`quant_linear`."""
    saved = Saved.of(given).unpacked(plan)
    if plan.fp8_gemm:
        return _product_of_codes(plan, saved, given)
    quantizer = None if plan.weight is None else saved.weight_quantizer(plan.weight)
    used = used_weight(given.weight, quantizer, saved.weight_codes)
    # The operands already have the model's dtype; under autocast, backward would not match the GEMM.
    # is_autocast_enabled raises for the meta device, where nothing is computed anyway.
    device = given.x.device.type
    autocast = device != "meta" and torch.is_autocast_enabled(device)
    with torch.autocast(device, enabled=False) if autocast else nullcontext():
        return gemm.linear(given.x if given.values is None else given.values, used, given.bias, given.offsets)


def _product_of_codes(plan: Plan, saved: Saved, given: Arguments) -> Tensor:
    """Multiply the codes of both operands on fp8 tensor cores, and the result by both scales."""
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
    """Return the weight that the GEMM in the model's dtype multiplies: fake-quantized, or unchanged without a
    quantizer."""
    if quantizer is None:
        return weight
    if codes is None:
        return kernels.fake_quantize(weight, quantizer, after=after)
    return kernels.dequantize(codes, quantizer, after=after)


def _input_gradients(ctx: Any, saved: Saved, grad: Tensor, wanted: bool) -> tuple[Tensor | None, ...]:
    """Compute the gradients of the input ``[..., in]`` (still unmasked if :func:`mask_` follows) and of its theta, from
    ``grad [tokens, out]``. The third tensor is zeros like the weight's theta if ``wanted`` and written in the same
    launch, else None."""
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
    """Compute the gradient of the weight, in its shape, and if ``theta_gradient`` the gradient of its theta, from
    ``grad [tokens, out]``."""
    plan: Plan = ctx.plan
    grad_used = gemm.weight_gradient(grad, used_x.reshape(-1, used_x.shape[-1]), saved.offsets)
    if plan.weight is None or is_placeholder(saved.weight):
        # For a placeholder, the owner of the weight computes the rest (:mod:`model.zero.quantized_gather`).
        return grad_used, None
    quantizer = saved.weight_quantizer(plan.weight)
    how: dict[str, Any] = {"factor": lsq_factor(plan.weight_numel, plan.weight), "theta_gradient": theta_gradient}
    return grad_used, kernels.fake_quantize_backward_(grad_used, saved.weight, quantizer, **how, of_weight=True)


class UsedWeightFunction(torch.autograd.Function):
    """Fake-quantize a weight for a layer whose product is not a plain GEMM. The caller keeps the fake-quantized copy.

    ``apply(spec, numel, weight, *scale)``, where ``numel`` weights share one scale. Saves the Parameters.
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
        if is_placeholder(weight):  # the owner of the weight computes the theta's gradient
            grad_theta = torch.zeros_like(scale[1]) if needs_theta else None
            return None, None, grad_weight if needs_weight else None, None, grad_theta, None, None
        quantizer = Quantizer(Scale(*scale), ctx.spec, weight.dtype)
        grad_theta = kernels.fake_quantize_backward_(
            grad_weight, weight, quantizer, factor=ctx.factor, theta_gradient=needs_theta, of_weight=True
        )
        return None, None, grad_weight if needs_weight else None, None, grad_theta, None, None
