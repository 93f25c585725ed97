"""Linear with quantized operands and its gradients: one autograd function with two methods of computation.

*simulate* multiplies fake-quantized operands in the model's dtype, ``F.linear(fq(x), fq(weight), bias)``; *fp8_gemm*
multiplies the codes on fp8 tensor cores and the result by both scales. Backward is the same for both: GEMMs of the
dequantized operands in the model's dtype.

A fake-quantized weight is not a leaf, so plain autograd would keep the whole tensor for backward and defeat ZeRO-3.
:class:`QuantLinearFunction` therefore saves

* the weight **Parameter** (ZeRO-3 gathers it again in backward), and quantizes it again unless its codes are kept
  because the weight stays resident,
* the Parameters of a merged adapter or of a decoupled scale (:mod:`quant.adapters`), and merges them again,
* the scale Parameters, a few bytes,
* the input, in one of three forms: 1-byte codes and a 1-bit mask of the unclipped elements if its scale is stored and
  does not learn; packed codes and scales (:func:`quant.kernels.keep_tokens`) for float formats with dynamic scales, if
  ``dynamic_codes`` is set and attention does not keep the input anyway (:mod:`quant.inputs`); otherwise the input
  itself. Layers that read the same tensor share one copy.

Nothing is saved or computed for an operand that needs no gradient.

:class:`UsedWeightFunction` fake-quantizes only the weight, for a layer whose product is not a plain GEMM, such as
lm_head.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from quant import gemm, kernels
from quant.adapters import Adapter, DecoupledScale, code_theta_gradient, low_rank_gradients, merge, weight_for_codes
from quant.inputs import QuantizedInput, Restored, SharedInput, Wanted, quantize_input
from quant.packed_weight import PackedCodes, codes_of_placeholder, is_placeholder
from quant.scale import Quantizer, Scale, lsq_factor
from quant.spec import TensorSpec


@dataclass(frozen=True)
class Plan:
    """Formats and options of :func:`quant_linear` for each operand.

    Attributes:
        weight: format of the weight; None leaves it unquantized.
        input: format of the input; None leaves it unquantized.
        weight_numel, fast_accum, dynamic_codes: as in :class:`quant.linear.QuantLinear`.
        input_numel: features of the input. LSQ's factor counts features, not tokens, so that gradients of micro-batches
            add up to the gradient of the batch.
        fp8_gemm: multiply the codes. Both operands must be e4m3 with one scale per tensor; ``in`` and ``out`` are
            multiples of 16.
        held: layout of the codes if the layer's weight is packed (frozen, stored as codes); else None.
        restored: cache for backward of the dequantized input, decoded once for all layers with the same input; None if
            no layers share the input.
        weight_scale: precomputed effective scale of the weight for the fp8 GEMM; None if the forward computes it.
        scaling: factor of the adapter that is merged into the weight, if there is one.
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
    scaling: float = 1.0


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
    adapter: Adapter | DecoupledScale | None = None,
) -> Tensor:
    """Compute ``F.linear`` of quantized operands.

    Args:
        x: ``[..., in]``; zero tokens are allowed and result in zero gradients, not None.
        weight, bias, offsets: as in :func:`quant.gemm.linear`, in the dtype of ``x``.
        weight_scale, input_scale: scales of the operands; None if no scale is stored. A scale whose theta trains is
            passed even if the operand is not quantized: theta then gets a gradient of zeros.
        plan: which operands are quantized, and how the product is computed.
        weight_codes: the weight's codes, if already computed; else None.
        shared: cache of the quantized input for layers that read the same tensor; None if no other layer reads it.
        adapter: adapter to merge into the weight, which is then frozen, or the weight's decoupled scale; or None.

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
        trains_weight = weight.requires_grad or _learns(weight_scale) or adapter is not None
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
    lora_a = lora_b = code_theta = None
    if isinstance(adapter, DecoupledScale):
        code_theta = adapter.code_theta
    elif adapter is not None:
        plan, lora_a, lora_b = replace(plan, scaling=adapter.scaling), adapter.lora_a, adapter.lora_b
    scales = (*(weight_scale or no_scale), input_s0, input_theta)
    tensors: list[Any] = [x, weight, bias, *scales, *quantized, weight_codes, offsets, lora_a, lora_b, code_theta]
    given = Arguments(*tensors)
    if not torch.is_grad_enabled():
        return product(plan, given)
    # Tensors are saved before the product is computed: with activation checkpointing, the last layer is then not
    # multiplied again, as torch stops the recomputation when all saved tensors are back.
    output: Tensor = _ProductFunction.apply(QuantLinearFunction.apply(plan, *given), plan, *given)
    return output


def _learns(scale: Scale | None) -> bool:
    return scale is not None and scale.theta is not None and scale.theta.requires_grad


class Arguments(NamedTuple):
    """Tensor arguments of :class:`QuantLinearFunction`, after its first argument ``plan``. The same fields hold the
    tensors saved for backward. A field is None if the layer has no such tensor, or the tensor is not saved.

    ``values, codes, mask, scales`` is a :class:`quant.inputs.QuantizedInput`. Saved are ``x`` (the input or its codes),
    the weight with its codes, scales and adapter, the scale of the input, ``mask``, ``scales`` and ``offsets``.
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
    lora_a: Any
    lora_b: Any
    code_theta: Any

    def weight_quantizer(self, spec: TensorSpec) -> Quantizer:
        scale = Scale(self.weight_s0, self.weight_theta, self.weight_global, self.weight_zero)
        return Quantizer(scale, spec, self.weight.dtype)

    def input_quantizer(self, spec: TensorSpec) -> Quantizer:
        return Quantizer(Scale(self.input_s0, self.input_theta), spec, self.weight.dtype)

    def merged(self, plan: Plan) -> "Arguments":
        """Return the arguments with the adapter merged into the weight (decoded first if packed). A decoupled scale is
        multiplied in if the plan quantizes the weight. Without either, return the arguments unchanged."""
        if self.code_theta is not None and plan.weight is not None:
            return self._replace(weight=weight_for_codes(self.weight, self.code_theta, plan.weight))
        if self.lora_a is None:
            return self
        weight = self.weight
        if plan.held is not None:
            weight = plan.held.values(weight, self.weight_quantizer(plan.held.spec))
        return self._replace(weight=merge(weight, self.lora_a, self.lora_b, plan.scaling))

    def unpacked(self, plan: Plan) -> "Arguments":
        """Return the arguments with ``weight_codes`` taken from the weight, if it stores codes (packed weight, or
        :func:`quant.packed_weight.placeholder`); otherwise unchanged, also if an adapter is merged into the weight."""
        if plan.held is not None and self.lora_a is None:
            return self._replace(weight_codes=plan.held.unpack(self.weight))
        if plan.weight is None or not is_placeholder(self.weight):
            return self
        return self._replace(weight_codes=codes_of_placeholder(self.weight, plan.weight))


def _needs(ctx: Any, plan: Plan) -> Arguments:
    """Return True for each argument of :class:`QuantLinearFunction` that needs a gradient; for the weight also if its
    adapter or decoupled scale needs one."""
    needs = Arguments(*ctx.needs_input_grad[1:])
    decoupled = needs.code_theta and plan.weight is not None
    return needs._replace(weight=needs.weight or needs.lora_a or needs.lora_b or decoupled)


class QuantLinearFunction(torch.autograd.Function):
    """Autograd function of :func:`quant_linear`: saves the tensors for backward and computes the gradients.

    ``apply(plan, *Arguments)`` returns a tensor of the output's shape without values or memory;
    :class:`_ProductFunction` then computes the output. No tensor is passed twice in one call: torch.compile would
    reject it.

    The merged weight of an adapter exists only while the layer runs. The adapter's gradients are computed from ``g``,
    the gradient of the merged weight, which is also temporary (for a stack, per expert); for an unquantized weight see
    :func:`quant.adapters.low_rank_gradients`::

        grad_b = scaling * g @ lora_a.t()    [out, rank]
        grad_a = scaling * lora_b.t() @ g    [rank, in]
    """

    @staticmethod
    def forward(ctx: Any, plan: Plan, *tensors: Tensor | None) -> Tensor:
        given, needs = Arguments(*tensors), _needs(ctx, plan)
        dynamic = plan.input is not None and plan.input.dynamic
        stored = plan.input is not None and not dynamic and not needs.input_theta
        ctx.plan, ctx.input_shape, ctx.keeps_codes = plan, given.x.shape, stored or given.scales is not None
        kept_x = given.codes if ctx.keeps_codes else given.x
        # The range of a dynamic grid, and so the mask of the gradient, is computed from the input.
        from_x = dynamic and not ctx.keeps_codes and needs.x
        if not (needs.weight or needs.weight_theta or needs.input_theta or from_x):
            kept_x = None
        if plan.restored is not None and (needs.weight or needs.weight_theta):
            plan.restored.layers += 1
        ctx.save_for_backward(*given._replace(x=kept_x, bias=None, values=None, codes=None))
        return given.x.new_empty(()).expand(*given.x.shape[:-1], given.weight.shape[-2])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        plan, needs = ctx.plan, _needs(ctx, ctx.plan)
        saved = Arguments(*ctx.saved_tensors)  # once: activation checkpointing frees on access
        saved = saved.merged(plan).unpacked(plan)
        grad = grad_output.reshape(-1, grad_output.shape[-1])  # [tokens, out]
        grad_x = grad_input_theta = grad_weight = grad_weight_theta = zeros = None
        grad_a = grad_b = grad_code_theta = None
        if needs.x or (needs.input_theta and plan.input is not None):
            grad_x, grad_input_theta, zeros = _input_gradients(ctx, saved, grad, needs.weight_theta)
        masked = (ctx.keeps_codes and saved.mask is not None) or (plan.input is not None and plan.input.dynamic)
        unmasked = grad_x if masked and saved.scales is None else None
        if needs.weight or (needs.weight_theta and plan.weight is not None):
            used_x = _used_input(ctx, saved, unmasked, after=grad)
            used_x = used_x.reshape(-1, used_x.shape[-1])
            if saved.lora_a is not None and plan.weight is None:
                grad_a, grad_b = low_rank_gradients(
                    grad, used_x, saved.lora_a, saved.lora_b, plan.scaling, saved.offsets
                )
            else:
                grad_weight, grad_weight_theta = _weight_gradients(plan, saved, grad, used_x, needs.weight_theta)
        elif unmasked is not None:
            _mask_(ctx, saved, unmasked)
        if saved.lora_a is not None and grad_weight is not None and needs.weight:
            a, b = saved.lora_a.transpose(-2, -1), saved.lora_b.transpose(-2, -1)
            grad_a, grad_b = (b @ grad_weight).mul_(plan.scaling), (grad_weight @ a).mul_(plan.scaling)
        if saved.code_theta is not None and plan.weight is not None and grad_weight is not None:
            factor, of_codes = lsq_factor(plan.weight_numel, plan.weight), (saved.code_theta, plan.weight)
            grad_code_theta = code_theta_gradient(grad_weight, saved.weight, *of_codes, factor)
            trains = Arguments(*ctx.needs_input_grad[1:]).weight
            grad_weight = weight_for_codes(grad_weight, *of_codes) if trains else None
        # A theta whose operand is not quantized now gets zeros: under ZeRO-3 a Parameter without a gradient would get
        # its last gradient again, in every step.
        if needs.input_theta and grad_input_theta is None:
            grad_input_theta = torch.zeros_like(saved.input_theta)
        if needs.weight_theta and grad_weight_theta is None:
            grad_weight_theta = torch.zeros_like(saved.weight_theta) if zeros is None else zeros
        if needs.code_theta and grad_code_theta is None:
            grad_code_theta = torch.zeros_like(saved.code_theta)
        gradients = Arguments(*[None] * len(Arguments._fields))._replace(
            x=grad_x if needs.x else None,
            weight=grad_weight if needs.weight and saved.lora_a is None else None,
            bias=grad.sum(0) if needs.bias else None,
            weight_theta=grad_weight_theta,
            input_theta=grad_input_theta,
            lora_a=grad_a if needs.lora_a else None,
            lora_b=grad_b if needs.lora_b else None,
            code_theta=grad_code_theta,
        )
        return None, *gradients


class _ProductFunction(torch.autograd.Function):
    """Autograd function that computes the output of :func:`quant_linear`, with straight-through backward.

    ``apply(placeholder, plan, *Arguments)``: the placeholder is the output of :class:`QuantLinearFunction`, which gets
    the gradient unchanged. No tensor is saved.
    """

    @staticmethod
    def forward(ctx: Any, placeholder: Tensor, plan: Plan, *tensors: Tensor | None) -> Tensor:
        return product(plan, Arguments(*tensors))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, *[None] * len(Arguments._fields)


def product(plan: Plan, given: Arguments) -> Tensor:
    """Compute the output ``[..., out]`` of :func:`quant_linear`, without a gradient."""
    if plan.weight is None or given.weight_codes is None:  # else the codes are used
        given = given.merged(plan)
    given = given.unpacked(plan)
    quantizer = None if plan.weight is None else given.weight_quantizer(plan.weight)
    if not plan.fp8_gemm:
        used = used_weight(given.weight, quantizer, given.weight_codes)
        # The operands already have the model's dtype; under autocast, backward would not match the GEMM.
        with gemm.without_autocast(given.x):
            return gemm.linear(given.x if given.values is None else given.values, used, given.bias, given.offsets)
    assert quantizer is not None and plan.input is not None
    input_scale = kernels.effective_scale(given.input_quantizer(plan.input))
    weight_codes, weight_scale = given.weight_codes, plan.weight_scale
    if weight_codes is None:
        weight_codes, weight_scale = kernels.quantize_with_scale(given.weight, quantizer)
    elif weight_scale is None:
        weight_scale = kernels.effective_scale(quantizer)
    codes = (given.codes, input_scale, weight_codes, weight_scale)
    return gemm.scaled_linear(*codes, given.bias, given.weight.dtype, given.offsets, fast_accum=plan.fast_accum)


def used_weight(
    weight: Tensor, quantizer: Quantizer | None, codes: Tensor | None, *, after: Tensor | None = None
) -> Tensor:
    """Return the weight that the GEMM in the model's dtype multiplies: fake-quantized (``codes`` dequantized, if they
    are given), or unchanged without a quantizer. ``after`` does not affect values (:mod:`quant.kernels.operators`)."""
    if quantizer is None:
        return weight
    if codes is None:
        return kernels.fake_quantize(weight, quantizer, after=after)
    return kernels.dequantize(codes, quantizer, after=after)


def _input_gradients(ctx: Any, saved: Arguments, grad: Tensor, wanted: bool) -> tuple[Tensor | None, ...]:
    """Compute the gradients of the input ``[..., in]`` and of its theta from ``grad [tokens, out]``. Where
    :func:`_mask_` follows, it zeroes clipped elements. The third result is a gradient of zeros for the weight's theta,
    if ``wanted`` and the kernel that decodes the weight can write it; else None."""
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
    plan: Plan, saved: Arguments, grad: Tensor, used_x: Tensor, theta_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Compute the gradient of the weight, in its shape, and if ``theta_gradient`` the gradient of its theta, from
    ``grad [tokens, out]`` and ``used_x [tokens, in]``."""
    grad_used = gemm.weight_gradient(grad, used_x, saved.offsets)
    if plan.weight is None or is_placeholder(saved.weight):
        # For a placeholder, the owner of the weight computes the rest (:mod:`model.zero.quantized_gather`).
        return grad_used, None
    quantizer, factor = saved.weight_quantizer(plan.weight), lsq_factor(plan.weight_numel, plan.weight)
    return grad_used, kernels.fake_quantize_backward_(
        grad_used, saved.weight, quantizer, factor=factor, theta_gradient=theta_gradient, of_weight=True
    )


def _mask_(ctx: Any, saved: Arguments, grad: Tensor) -> None:
    """Zero the gradient ``grad`` of the input in place where the forward clipped the input."""
    if ctx.keeps_codes:
        kernels.masked_(grad, saved.mask)
    else:
        kernels.fake_quantize_tokens_and_mask_(grad, saved.x, ctx.plan.input, saved.input_s0, values=False)


def _used_input(ctx: Any, saved: Arguments, unmasked: Tensor | None, *, after: Tensor) -> Tensor:
    """Restore the quantized input of the forward's GEMM from the saved tensors. Also zeroes the input's gradient
    ``unmasked`` in place where the forward clipped the input, if possible in the same kernel."""
    spec, restored, x = ctx.plan.input, ctx.plan.restored, saved.x
    make: Callable[[], Any]
    if spec is None:
        return x
    if unmasked is not None and restored is not None and restored.has(x):
        _mask_(ctx, saved, unmasked)
    if saved.scales is not None:
        make = partial(kernels.restore_tokens, x, saved.scales, spec, saved.weight.dtype, saved.input_s0, after=after)
    elif spec.dynamic and unmasked is not None:
        make = partial(kernels.fake_quantize_tokens_and_mask_, unmasked, x, spec, saved.input_s0, values=True)
    elif spec.dynamic:
        make = partial(kernels.fake_quantize_tokens, x, spec, saved.input_s0, after=after)
    elif unmasked is not None:
        make = partial(kernels.dequantize_and_mask_, unmasked, saved.mask, x, saved.input_quantizer(spec))
    else:
        restore = kernels.dequantize if ctx.keeps_codes else kernels.fake_quantize
        make = partial(restore, x, saved.input_quantizer(spec), after=after)
    values: Any = make() if restored is None else restored.get(x, make)
    return values


class UsedWeightFunction(torch.autograd.Function):
    """Autograd function that fake-quantizes a weight, for layers whose product is not a plain GEMM, such as lm_head.
    ``apply(spec, factor, weight, *scale)``: ``factor`` multiplies theta's gradient, ``scale`` are the fields of the
    weight's :class:`quant.scale.Scale`. Saves the Parameters of weight and scale for backward."""

    @staticmethod
    def forward(ctx: Any, spec: TensorSpec, factor: float, weight: Tensor, *scale: Any) -> Tensor:
        ctx.save_for_backward(weight, *scale)
        ctx.spec, ctx.factor = spec, factor
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
        else:
            quantizer = Quantizer(Scale(*scale), ctx.spec, weight.dtype)
            grad_theta = kernels.fake_quantize_backward_(
                grad_weight, weight, quantizer, factor=ctx.factor, theta_gradient=needs_theta, of_weight=True
            )
        return None, None, grad_weight if needs_weight else None, None, grad_theta, None, None
