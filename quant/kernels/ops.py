"""The quantisers as functions; each calls an operator of :mod:`quant.kernels.registration`."""

import torch
from torch import Tensor

from quant.kernels.build import ensure_ready
from quant.reference import absmax_scale, dynamic_scale, round_scale
from quant.scale import Quantizer
from quant.spec import TensorSpec

_OPS = torch.ops.deepqat
_FLOAT_GRIDS = {"fp8_e4m3": 0, "fp4_e2m1": 1}


def grid_of(spec: TensorSpec) -> int:
    """The number that stands for the grid of ``spec`` in calls of the operators."""
    return _FLOAT_GRIDS.get(spec.dtype, -spec.bits if spec.narrow else spec.bits)


def stored_dtype(spec: TensorSpec, model_dtype: torch.dtype) -> torch.dtype:
    """The dtype that the operators round a scale to."""
    return {"model": model_dtype, "float16": torch.float16}.get(spec.scale_format, torch.float32)


def effective_scale(quantizer: Quantizer, *, after: Tensor | None = None) -> Tensor:
    """The scale that the forward uses, :func:`quant.reference.effective_scale`, without a gradient; ``after`` as in
    :mod:`quant.kernels.registration`, here and below."""
    (s0, theta, above, _), spec, dtype = quantizer
    scale = _learned_scale(s0, theta, stored_dtype(spec, dtype), after=after)
    if spec.scale_format not in ("e8m0", "e4m3"):
        return scale
    if above is not None:
        above = above.view(-1, *[1] * (s0.dim() - 1))  # of a stack, one per expert
    return round_scale(scale, spec, above)


def _learned_scale(s0: Tensor, theta: Tensor | None, scale_dtype: torch.dtype, *, after: Tensor | None) -> Tensor:
    """``s0 * exp(theta)`` rounded to ``scale_dtype``, as fp32 in s0's shape."""
    if theta is None and scale_dtype == torch.float32 and after is None:
        return s0
    ensure_ready()
    return _OPS.effective_scale(s0, theta, scale_dtype, after)


def quantize(x: Tensor, quantizer: Quantizer, *, mask: bool = False) -> tuple[Tensor, Tensor]:
    """Codes of ``x`` in its shape, and which elements are inside the range.

    Args:
        x: any shape and stride; fp32, bf16 or fp16.
        quantizer: its format and scale. Except with scales per block, which elements share a scale follows from the
            number of scales: ``n`` of them divide ``x`` into ``n`` equal consecutive parts. The parts of the scale must
            be contiguous.
        mask: whether the mask is wanted.

    Returns:
        Codes (``float8_e4m3fn``, ``int8`` or, of e2m1, ``uint8``), and the mask as uint8 ``[ceil(numel / 8)]``, element
        ``i`` at bit ``i % 8`` of byte ``i // 8`` (empty if it is not wanted).

    Raises:
        RuntimeError: the scales do not divide ``x``, or a dtype is none of those above. So do the other functions.
    """
    ensure_ready()
    s0, theta, grid, stored = _of_runs(quantizer)
    return _OPS.quantize(x, s0, theta, grid, stored, mask, quantizer.scale.zero)


def quantize_with_values(x: Tensor, quantizer: Quantizer, *, mask: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`quantize` and :func:`fake_quantize` in one pass: codes, mask, values."""
    ensure_ready()
    s0, theta, grid, stored = _of_runs(quantizer)
    return _OPS.quantize_with_values(x, s0, theta, grid, stored, mask, quantizer.scale.zero)


def dequantize(codes: Tensor, quantizer: Quantizer, *, after: Tensor | None = None) -> Tensor:
    """``(codes - zero) * scale`` in the model's dtype, in the shape of ``codes``."""
    ensure_ready()
    s0, theta, _, stored = _of_runs(quantizer, after)
    return _OPS.dequantize(codes, s0, theta, stored, quantizer.dtype, after, quantizer.scale.zero)


def fake_quantize(x: Tensor, quantizer: Quantizer, *, after: Tensor | None = None) -> Tensor:
    """``x`` through the grid and back, in its shape and dtype.

    Differentiable in ``x``, and in theta (without LSQ's factor) where the kernels form the scale, see
    :func:`fake_quantize_backward_`.
    """
    ensure_ready()
    operator = _OPS.fake_quantize if torch.is_grad_enabled() else _OPS.fake_quantized
    s0, theta, grid, stored = _of_runs(quantizer, after)
    return operator(x, s0, theta, grid, stored, after, quantizer.scale.zero)


def fake_quantize_backward_(
    grad: Tensor, x: Tensor, quantizer: Quantizer, *, factor: float, theta_gradient: bool
) -> Tensor | None:
    """Gradients of :func:`fake_quantize` in one pass: theta's, times ``factor``, where wanted; that of ``x`` takes the
    place of ``grad``.

    ``grad`` is contiguous, in the shape and dtype of ``x``. Sums are fp32, in an order that depends on the shape alone.
    """
    ensure_ready()
    (s0, theta, _, zero), spec, _ = quantizer
    if not theta_gradient or _kernels_form_it(spec):
        operands = _of_runs(quantizer, grad)
        grad_theta = _OPS.fake_quantize_backward_(grad, x, *operands, factor, theta_gradient, zero)
        return grad_theta if theta_gradient else None
    assert theta is not None
    learned = _learned_scale(s0, theta, torch.float32, after=grad)
    effective = effective_scale(quantizer, after=grad)
    runs = _per_run(effective, spec)
    # With a theta of 0 the kernel multiplies by the effective scale, where s0 * exp(theta) belongs.
    operands = (runs, torch.zeros_like(runs), grid_of(spec), torch.float32)
    gradient = _OPS.fake_quantize_backward_(grad, x, *operands, factor, True, None)
    if spec.granularity == "block":
        gradient = gradient.unflatten(-2, (effective.shape[-2], -1)).sum(-2)
    return (gradient * (learned / effective)).to(theta.dtype)


def _kernels_form_it(spec: TensorSpec) -> bool:
    """Whether the kernels form the effective scale from s0 and theta.

    They give each of ``n`` equal runs of consecutive elements the scale ``s0 * exp(theta)``, rounded at most to a
    dtype. Two kinds of scales are not like that: one per block covers runs in many rows, and those of 4-bit floats are
    rounded to e8m0, or to e4m3 below a global scale. Of these the effective scales are formed first, one per run, which
    the kernels take as they are: an fp32 number for 128, 32 or 16 weights, as long as the operation lasts.
    """
    return spec.granularity != "block" and spec.scale_format in ("float32", "model", "float16")


def _of_runs(quantizer: Quantizer, after: Tensor | None = None) -> tuple[Tensor, Tensor | None, int, torch.dtype]:
    """``s0, theta, grid, scale_dtype`` for the operators."""
    (s0, theta, _, _), spec, dtype = quantizer
    if _kernels_form_it(spec):
        return s0, theta, grid_of(spec), stored_dtype(spec, dtype)
    return _per_run(effective_scale(quantizer, after=after), spec), None, grid_of(spec), torch.float32


def _per_run(scale: Tensor, spec: TensorSpec) -> Tensor:
    """``[..., out / size, in / size]`` of blocks as ``[..., out, in / size]``; others as they are."""
    if spec.granularity != "block":
        return scale
    assert spec.group_size is not None
    return scale.repeat_interleave(spec.group_size, dim=-2)


def masked_(grad: Tensor, mask: Tensor) -> Tensor:
    """Make ``grad``, which is contiguous, zero where the mask of :func:`quantize` says that an element is outside."""
    ensure_ready()
    _OPS.masked_(grad, mask)
    return grad


def amax(x: Tensor, count: int = 1) -> Tensor:
    """Largest magnitude of each of ``count`` equal consecutive parts: fp32 ``[count]``, NaN where there is one, 0 of
    nothing."""
    ensure_ready()
    return _OPS.amax(x, count)


def quantize_tokens(x: Tensor, spec: TensorSpec, above: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Dynamic codes of ``x [..., features]``, and their fp32 scales and int8 zero points ``[..., n]``, of the ``n``
    groups of a token (one per token). ``above`` is the global scale, fp32 ``(1,)``, where ``spec`` has one; here and
    below."""
    ensure_ready()
    if _stored_in_a_byte(spec):
        scale = _scale_of_groups(x, spec, above)
        shape = (*x.shape[:-1], -1)
        zero = torch.zeros_like(scale, dtype=torch.int8).view(shape)
        return _OPS.quantize(x, scale, None, grid_of(spec), torch.float32, False)[0], scale.view(shape), zero
    codes, scale, zero_point = _OPS.quantize_tokens(_token_groups(x, spec), grid_of(spec), spec.symmetric)
    return codes.view(x.shape), scale.flatten(x.dim() - 1), zero_point.flatten(x.dim() - 1)


def fake_quantize_tokens(
    x: Tensor, spec: TensorSpec, above: Tensor | None = None, *, after: Tensor | None = None
) -> Tensor:
    """Each token, or group of its features, of ``x [..., features]`` through its own grid and back. Differentiable."""
    ensure_ready()
    if _stored_in_a_byte(spec):
        operator = _OPS.fake_quantize if torch.is_grad_enabled() else _OPS.fake_quantized
        scale = _scale_of_groups(x, spec, above)
        return operator(x, scale, None, grid_of(spec), torch.float32, after) if x.numel() else x.new_empty(x.shape)
    operator = _OPS.fake_quantize_tokens if torch.is_grad_enabled() else _OPS.fake_quantized_tokens
    values = operator(_token_groups(x, spec), grid_of(spec), spec.symmetric, after)
    return values.view(x.shape)


def fake_quantize_tokens_backward(grad: Tensor, x: Tensor, spec: TensorSpec, above: Tensor | None = None) -> Tensor:
    """Gradient of :func:`fake_quantize_tokens`; ``grad`` has the shape and dtype of ``x``."""
    ensure_ready()
    if _stored_in_a_byte(spec):
        scale = _scale_of_groups(x, spec, above)
        if x.numel() == 0:
            return grad
        return _OPS.fake_quantize_backward(grad, x, scale, None, grid_of(spec), torch.float32, 1.0, False)[0]
    grads, groups = _token_groups(grad, spec), _token_groups(x, spec)
    return _OPS.fake_quantize_tokens_backward(grads, groups, grid_of(spec), spec.symmetric).view(x.shape)


def _stored_in_a_byte(spec: TensorSpec) -> bool:
    """Whether dynamic scales are e4m3 numbers below a global scale, or powers of two."""
    return spec.scale_format in ("e4m3", "e8m0")


def _scale_of_groups(x: Tensor, spec: TensorSpec, above: Tensor | None) -> Tensor:
    """The scale of each group of ``x``, below the global scale where there is one, fp32, one dimension."""
    assert spec.group_size is not None
    count = x.numel() // spec.group_size
    absmax = _OPS.amax(x.detach(), count) if count else x.new_empty(0, dtype=torch.float32)
    if above is not None:
        return dynamic_scale(absmax, above)
    scale = absmax_scale(absmax, spec)
    return torch.where(scale.isfinite(), scale, torch.nan)


def _token_groups(x: Tensor, spec: TensorSpec) -> Tensor:
    """``x`` with the elements that share a scale along the last dimension."""
    return x if spec.group_size is None else x.unflatten(-1, (-1, spec.group_size))
