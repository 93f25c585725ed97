"""Fused quantizers for CPU and CUDA: results of quant/reference.py, computed in one pass over memory.

Each function calls an operator of :mod:`quant.kernels.operators`, which :mod:`quant.kernels.build_kernels` compiles at
first use. ``arithmetic.h`` contains the arithmetic shared by both backends, ``cpu/`` and ``cuda/`` the kernels,
``bindings.cpp`` their binding as operators. The files ``fused*`` contain RMSNorm and SwiGLU with quantized results.
"""

from typing import Any

import torch
from torch import Tensor

from quant.formats.packing import unpack_nibbles
from quant.kernels.build_kernels import ensure_ready
from quant.kernels.build_kernels import prepare_kernels as prepare_kernels
from quant.kernels.operators import REFERENCE
from quant.scale import Quantizer
from quant.spec import TensorSpec, per_block, per_run

_FLOAT_GRIDS = {"fp8_e4m3": 0, "fp4_e2m1": 1}
_STORED = {"float16": torch.float16, "e8m0": torch.float8_e8m0fnu, "e4m3": torch.float8_e4m3fn}


def _operators() -> Any:
    """Return the operators, compiled if they were not yet."""
    ensure_ready()
    return torch.ops.deepqat


def grid_of(spec: TensorSpec) -> int:
    """Return the integer that stands for the grid of ``spec`` (:mod:`quant.kernels.operators` describes it)."""
    return _FLOAT_GRIDS.get(spec.dtype, -spec.bits if spec.narrow else spec.bits)


def stored_dtype(spec: TensorSpec, model_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to which the operators round a scale of ``spec``: ``model_dtype``, if ``spec`` stores scales in
    the model's dtype, else the dtype of its scale format."""
    return {"model": model_dtype, **_STORED}.get(spec.scale_format, torch.float32)


def effective_scale(quantizer: Quantizer, *, after: Tensor | None = None) -> Tensor:
    """Compute the scale ``s0 * exp(theta)``, fp32 in the shape of ``s0``, rounded to its stored format, without a
    gradient. The result may be ``s0`` itself.

    Here and in other functions, callers in backward pass a gradient as ``after``. It does not affect the result, but
    keeps ``torch.compile`` from storing the forward's result for backward (:mod:`quant.kernels.operators`)."""
    (s0, theta, above, _), spec, dtype = quantizer
    stored = stored_dtype(spec, dtype)
    if theta is None and stored == torch.float32 and after is None:
        return s0
    return _operators().effective_scale(s0, theta, stored, after, above)


def quantize(x: Tensor, quantizer: Quantizer, *, mask: bool = False) -> tuple[Tensor, Tensor]:
    """Compute codes of ``x``, in its shape, and the mask of elements inside the range.

    Args:
        x: any shape and stride; fp32, bf16 or fp16.
        quantizer: format and scale. ``n`` scales divide the elements of ``x``, in row-major order, into ``n`` equal
            consecutive segments; with scales per block ``x`` is a whole weight ``[out, in]`` and each block has one.
            The scale's tensors must be contiguous.
        mask: compute the mask.

    Returns:
        Codes (``float8_e4m3fn``, ``int8`` or, for e2m1, ``uint8``), and the mask as uint8 ``[ceil(numel / 8)]``,
        element ``i`` at bit ``i % 8`` of byte ``i // 8`` (empty without ``mask``).

    Raises:
        RuntimeError: the scales do not divide ``x``, or a dtype is not supported. Other functions of this module raise
            it for the same reasons.
    """
    codes, inside, *_ = _quantized(x, quantizer, mask=mask)
    return codes, inside


def quantize_with_values(x: Tensor, quantizer: Quantizer, *, mask: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Compute codes and mask as :func:`quantize`, and as a third result the fake-quantized values, in one pass."""
    return _quantized(x, quantizer, mask=mask, values=True)[:3]


def quantize_with_scale(x: Tensor, quantizer: Quantizer) -> tuple[Tensor, Tensor]:
    """Compute the codes of :func:`quantize` and the scale of :func:`effective_scale` in one launch; not for scales per
    block."""
    s0, theta, _, stored = _run_scales(x.shape, quantizer)
    known = theta is None and stored == torch.float32
    codes, _, _, scale = _quantized(x, quantizer, scale=not known)
    return codes, s0 if known else scale


def _quantized(
    x: Tensor, quantizer: Quantizer, *, mask: bool = False, values: bool = False, scale: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the codes and, if requested, the mask, the values and the scale in one launch."""
    return _operators().quantize(x, *_run_scales(x.shape, quantizer), mask, values, scale, *_zero_and_above(quantizer))


def dequantize(codes: Tensor, quantizer: Quantizer, *, after: Tensor | None = None) -> Tensor:
    """Compute ``(codes - zero) * scale`` in the model's dtype, in the shape of ``codes``."""
    return _dequantized(codes, quantizer, False, after)[0]


def dequantize_with_zeros(codes: Tensor, quantizer: Quantizer, *, after: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the result of :func:`dequantize`, and zeros in the shape and dtype of the scale's theta (empty without
    theta) that are to become theta's gradient, in one launch; not for scales per block."""
    return _dequantized(codes, quantizer, True, after)


def _dequantized(codes: Tensor, quantizer: Quantizer, zeros: bool, after: Tensor | None) -> tuple[Tensor, Tensor]:
    s0, theta, _, stored = _run_scales(codes.shape, quantizer, after)
    operands = (codes, s0, theta, stored, quantizer.dtype, zeros, after, *_zero_and_above(quantizer))
    return _operators().dequantize(*operands)


def fake_quantize(x: Tensor, quantizer: Quantizer, *, after: Tensor | None = None) -> Tensor:
    """Quantize and dequantize ``x``, in its shape and dtype, without a gradient (which
    :func:`fake_quantize_backward_` computes)."""
    return _operators().fake_quantize(x, *_run_scales(x.shape, quantizer, after), after, *_zero_and_above(quantizer))


def fake_quantize_backward_(
    grad: Tensor, x: Tensor, quantizer: Quantizer, *, factor: float, theta_gradient: bool, of_weight: bool = False
) -> Tensor | None:
    """Compute the gradients of :func:`fake_quantize` in one pass: overwrites ``grad`` with the gradient of ``x``, and
    returns theta's gradient times ``factor`` if ``theta_gradient``, else None.

    With ``of_weight``, a non-finite ``x / s`` shows as a NaN: in theta's gradient if that is requested, else in the
    gradient of ``x``. Without it, the gradient of such an element of ``x`` is 0.

    ``grad`` is contiguous, in the shape and dtype of ``x``. Sums are fp32, in an order that depends only on the shape.
    """
    (s0, theta, *_), spec, _ = quantizer
    if not theta_gradient or spec.granularity != "block":
        of_x = (grad, x, *_run_scales(x.shape, quantizer, grad), factor, theta_gradient)
        grad_theta = _operators().fake_quantize_backward_(*of_x, *_zero_and_above(quantizer), of_weight)
        return grad_theta if theta_gradient else None
    assert theta is not None
    effective = effective_scale(quantizer, after=grad)
    runs = per_run(effective, x.shape, spec)
    # With theta 0, the kernel multiplies by the effective scale instead of s0 * exp(theta).
    operands = (runs, torch.zeros_like(runs), grid_of(spec), torch.float32)
    gradient = _operators().fake_quantize_backward_(grad, x, *operands, factor, True, of_weight=of_weight)
    gradient = per_block(gradient, x.shape, spec).sum(-2)
    if stored_dtype(spec, quantizer.dtype) != torch.float32:  # else the factor is 1
        gradient = gradient * (_operators().effective_scale(s0, theta, torch.float32, grad) / effective)
    return gradient.to(theta.dtype)


def _run_scales(
    shape: tuple[int, ...], quantizer: Quantizer, after: Tensor | None = None
) -> tuple[Tensor, Tensor | None, int, torch.dtype]:
    """Return the operators' arguments ``s0, theta, grid, scale_dtype`` for a tensor of ``shape``.

    The operators take one scale per run of consecutive elements, with runs of equal length. A scale per block covers
    runs in many rows, so its effective scale, in fp32, is repeated as the ``s0`` of each run
    (:func:`quant.spec.per_run`), and ``theta`` is None.
    """
    (s0, theta, _, _), spec, dtype = quantizer
    if spec.granularity != "block":
        return s0, theta, grid_of(spec), stored_dtype(spec, dtype)
    return per_run(effective_scale(quantizer, after=after), shape, spec), None, grid_of(spec), torch.float32


def _zero_and_above(quantizer: Quantizer) -> tuple[Tensor | None, Tensor | None]:
    """Return ``zero, above`` for the operators: zero points and global scale, or None."""
    return quantizer.scale.zero, quantizer.scale.global_


def multiply_runs(x: Tensor, theta: Tensor) -> Tensor:
    """Multiply ``x`` by ``exp(theta)``, rounded once to the dtype of ``x``, without a gradient.

    ``theta``, contiguous, fp32, bf16 or fp16, has one element for each of ``theta.numel()`` equal consecutive segments
    of ``x``. The factor is computed in fp64 and rounded to fp32.
    """
    return _operators().multiply_runs(x, theta)


def sum_products(x: Tensor, y: Tensor, theta: Tensor, factor: float) -> Tensor:
    """Sum ``x * y`` over each of ``theta.numel()`` equal consecutive segments, times ``factor``. The result has the
    shape and dtype of ``theta``, whose values are not used. ``x`` and ``y`` have one shape and dtype. Sums are fp32, in
    an order that depends only on the shape."""
    return _operators().sum_products(x, y, theta, factor)


def masked_(grad: Tensor, mask: Tensor) -> Tensor:
    """Zero the contiguous ``grad`` in place where ``mask`` (the packed bits of :func:`quantize`) is 0; return it."""
    _operators().masked_(grad, mask)
    return grad


def dequantize_and_mask_(grad: Tensor, mask: Tensor, codes: Tensor, quantizer: Quantizer) -> Tensor:
    """Zero ``grad`` in place where ``mask`` is 0, and return ``codes``, which have the shape of ``grad``, dequantized
    to the dtype of ``grad``, in one launch; not for scales per block."""
    s0, theta, _, stored = _run_scales(codes.shape, quantizer)
    return _operators().dequantize_and_mask_(grad, mask, codes, s0, theta, stored, *_zero_and_above(quantizer))


def amax(x: Tensor, count: int = 1) -> Tensor:
    """Compute the largest magnitude of each of ``count`` equal consecutive segments: fp32 ``[count]``, NaN for a
    segment with NaN, 0 if empty."""
    return _operators().amax(x, count)


def fake_quantize_tokens(
    x: Tensor, spec: TensorSpec, above: Tensor | None = None, *, after: Tensor | None = None
) -> Tensor:
    """Quantize and dequantize ``x [..., features]`` with dynamic scales per token or group, without a gradient.
    ``above`` is the global scale, fp32 ``(1,)``, if ``spec`` has one."""
    of_x = (_token_groups(x, spec), grid_of(spec), spec.symmetric)
    return _operators().fake_quantize_tokens(*of_x, after, *_stored(spec, above)).view(x.shape)


def fake_quantize_tokens_and_mask_(
    grad: Tensor, x: Tensor, spec: TensorSpec, above: Tensor | None = None, *, values: bool
) -> Tensor | None:
    """Compute the backward of :func:`fake_quantize_tokens`: overwrites ``grad``, contiguous in the shape and dtype of
    ``x``, with the gradient of ``x``. Returns the fake-quantized ``x`` from the same launch if ``values``, else
    None."""
    groups = (_token_groups(grad, spec), _token_groups(x, spec))
    operands = (*groups, grid_of(spec), spec.symmetric, values, *_stored(spec, above))
    found: Tensor = _operators().fake_quantize_tokens_and_mask_(*operands)
    return found.view(x.shape) if values else None


def keep_tokens(
    x: Tensor, spec: TensorSpec, above: Tensor | None = None, *, mask: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Fake-quantize ``x`` to a float format (e4m3, e2m1) with dynamic scales; also return codes, mask and scales to
    save for backward. ``above`` is the global scale, if ``spec`` has one.

    Returns:
        Values in the shape and dtype of ``x``; packed codes (e2m1: uint8 ``[..., features / 2]``, e4m3 in the shape of
        ``x``); the mask of :func:`quantize` if ``mask`` and elements may be clipped, else empty; and the scales of the
        groups ``[..., n, 1]`` in their stored format, which is exact. Scales in fp32 or powers of two never clip
        elements. With e4m3 scales elements may be clipped: a scale saturates if its group is too large for the global
        scale, and small e4m3 numbers are coarse.
    """
    groups, clips = _token_groups(x, spec), mask and above is not None
    values, codes, clipped, scales = _operators().keep_tokens(groups, grid_of(spec), clips, *_stored(spec, above))
    return values.view(x.shape), codes.view(*x.shape[:-1], -1), clipped, scales.view(*groups.shape[:-1], 1)


def restore_tokens(
    codes: Tensor, scales: Tensor, spec: TensorSpec, dtype: torch.dtype, above: Tensor | None, *, after: Tensor | None
) -> Tensor:
    """Dequantize the codes of :func:`keep_tokens` to the values that this function returned, bit for bit. ``dtype`` is
    the dtype of these values, ``above`` the global scale or None. ``after`` is the gradient in backward, else None, as
    in :func:`effective_scale`."""
    if spec.dtype == "fp4_e2m1":
        codes = unpack_nibbles(codes.view(-1, codes.shape[-1])).view(*codes.shape[:-1], -1)
    scale = scales.float() if above is None else scales.float() / above
    return _operators().dequantize(codes, scale, None, torch.float32, dtype, False, after)[0]


def kept_gradient_(grad: Tensor, scales: Tensor, mask: Tensor) -> Tensor:
    """Zero the contiguous ``grad`` in place for elements that were clipped or not finite, according to the mask and
    the scales that :func:`keep_tokens` returned; return ``grad``."""
    if grad.numel() == 0:
        return grad
    if mask.numel() > 0:
        return masked_(grad, mask)
    nan = scales.float().isnan()
    # On the CPU a check of the few scales often skips the pass. On a GPU the host would wait for the check.
    if grad.device.type != "cpu" or torch.compiler.is_compiling() or nan.any():
        grad.view(*scales.shape[:-1], -1).masked_fill_(nan, 0)
    return grad


def sum_rows(rows: Tensor, places: Tensor) -> Tensor:
    """Sum K of the ``rows`` [N, H] for each of T results [T, H], without a gradient: ``places`` [T, K] (int64, below N)
    has the indices of the rows to add.

    A result's rows are added one by one, in their order in ``places``, and each sum is rounded to the dtype of the
    rows: fp32, bf16 or fp16. fp64, used in tests, has no kernel.
    """
    if rows.dtype == torch.float64:
        return REFERENCE["sum_rows"](rows, places)
    return _operators().sum_rows(rows, places)


def rms_norm_quantize(
    x: Tensor, weight: Tensor, eps: float, quantizer: Quantizer, *, mask: bool, values: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute RMSNorm and quantize its result with one fixed scale, without a gradient.

    ``x`` and ``weight`` are ``[..., n]`` and ``[n]`` of one dtype; n is a multiple of 8 and at most 16,384. Returns
    codes and mask of :func:`quantize`, values of :func:`fake_quantize` (mask and values are empty unless requested),
    and ``rstd`` for :func:`rms_norm_backward`.
    """
    return _operators().rms_norm_quantize(x, weight, eps, *_single_scale(quantizer), mask, values)


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, mask: Tensor, *, weight_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Compute the gradients of ``x`` and, if ``weight_gradient`` (else None), of ``weight`` for
    :func:`rms_norm_quantize`, which returned ``rstd`` and ``mask``; ``grad`` is the gradient of the values."""
    of_x, of_weight = _operators().rms_norm_backward(grad, x, weight, rstd, mask, weight_gradient)
    return of_x, of_weight if weight_gradient else None


def silu_mul_quantize(
    gate: Tensor, up: Tensor, quantizer: Quantizer, *, mask: bool, values: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``silu(gate) * up`` and quantize it with one fixed scale: codes and mask of :func:`quantize`, and values
    of :func:`fake_quantize` (mask and values are empty unless requested). ``gate`` and ``up`` have one shape and
    dtype."""
    return _operators().silu_mul_quantize(gate, up, *_single_scale(quantizer), mask, values)


def silu_mul_backward(grad: Tensor, gate: Tensor, up: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gradients of ``gate`` and ``up`` for :func:`silu_mul_quantize`, which returned ``mask``; ``grad`` is
    the gradient of the values."""
    return _operators().silu_mul_backward(grad, gate, up, mask)


def _single_scale(quantizer: Quantizer) -> tuple[Tensor, int, torch.dtype]:
    """Return ``s0, grid, scale_dtype`` for a kernel that takes one scale per tensor, which must not learn."""
    (s0, theta, _, _), spec, dtype = quantizer
    assert theta is None and spec.granularity == "tensor"
    return s0, grid_of(spec), stored_dtype(spec, dtype)


def _stored(spec: TensorSpec, above: Tensor | None) -> tuple[torch.dtype | None, Tensor | None]:
    """Return ``scale_dtype, above`` for the operators on tokens."""
    return _STORED.get(spec.scale_format), above


def _token_groups(x: Tensor, spec: TensorSpec) -> Tensor:
    """View ``x`` with the elements that share a scale along the last dimension."""
    return x if spec.group_size is None else x.unflatten(-1, (-1, spec.group_size))
