"""The quantisers as functions; each calls an operator of :mod:`quant.kernels.registration`."""

import torch
from torch import Tensor

from quant.kernels.registration import ensure_ready
from quant.reference import round_scale
from quant.spec import TensorSpec

_OPS = torch.ops.deepqat
_FLOAT_GRIDS = {"fp8_e4m3": 0, "fp4_e2m1": 1}


def grid_of(spec: TensorSpec) -> int:
    """The number by which the operators know a grid."""
    return _FLOAT_GRIDS.get(spec.dtype, spec.bits)


def stored_dtype(spec: TensorSpec, model_dtype: torch.dtype) -> torch.dtype:
    """The dtype that the operators round a scale to."""
    return model_dtype if spec.scale_format == "model" else torch.float32


def effective_scale(
    s0: Tensor,
    theta: Tensor | None,
    spec: TensorSpec,
    model_dtype: torch.dtype,
    global_scale: Tensor | None = None,
    *,
    after: Tensor | None = None,
) -> Tensor:
    """:func:`quant.reference.effective_scale` without a gradient, for those who need the scale as a tensor; ``after``
    as above."""
    scale = learned_scale(s0, theta, stored_dtype(spec, model_dtype), after=after)
    return round_scale(scale, spec, global_scale) if spec.scale_format in ("e8m0", "e4m3") else scale


def learned_scale(
    s0: Tensor, theta: Tensor | None, scale_dtype: torch.dtype = torch.float32, *, after: Tensor | None = None
) -> Tensor:
    """``s0 * exp(theta)`` rounded to ``scale_dtype``, as fp32 in s0's shape; ``after`` as above."""
    if theta is None and scale_dtype == torch.float32 and after is None:
        return s0
    ensure_ready()
    return _OPS.effective_scale(s0, theta, scale_dtype, after)


def quantize(
    x: Tensor,
    s0: Tensor,
    theta: Tensor | None,
    spec: TensorSpec,
    model_dtype: torch.dtype,
    zero: Tensor | None = None,
    *,
    mask: bool = False,
) -> tuple[Tensor, Tensor]:
    """Codes of ``x`` in its shape, and which elements are inside the range.

    Args:
        x: any shape and stride; fp32, bf16 or fp16.
        s0: frozen scale, fp32, contiguous; its elements divide ``x`` into equal parts.
        theta: learned logarithmic correction in any of these dtypes and s0's shape, or None.
        spec: the grid. Which elements share a scale follows from the number of scales, not from its granularity.
        model_dtype: dtype of the model's weights.
        zero: the scales' zero points, fp32, contiguous, in s0's shape; of integers only.
        mask: whether the mask is wanted.

    Returns:
        Codes (``float8_e4m3fn``, ``int8`` or, of e2m1, ``uint8``), and the mask as uint8 ``[ceil(numel / 8)]``, element
        ``i`` at bit ``i % 8`` of byte ``i // 8`` (empty if it is not wanted).

    Raises:
        RuntimeError: the scales do not divide ``x``, or a dtype is none of those above. So do the other operators.
    """
    ensure_ready()
    return _OPS.quantize(x, s0, theta, grid_of(spec), stored_dtype(spec, model_dtype), mask, zero)


def quantize_with_values(
    x: Tensor,
    s0: Tensor,
    theta: Tensor | None,
    spec: TensorSpec,
    model_dtype: torch.dtype,
    zero: Tensor | None = None,
    *,
    mask: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`quantize` and :func:`fake_quantize` in one pass: codes, mask, values."""
    ensure_ready()
    return _OPS.quantize_with_values(x, s0, theta, grid_of(spec), stored_dtype(spec, model_dtype), mask, zero)


def dequantize(
    codes: Tensor,
    s0: Tensor,
    theta: Tensor | None,
    spec: TensorSpec,
    model_dtype: torch.dtype,
    dtype: torch.dtype,
    zero: Tensor | None = None,
    *,
    after: Tensor | None = None,
) -> Tensor:
    """``(codes - zero) * scale`` in ``dtype``, in the shape of ``codes``; other arguments as for :func:`quantize`,
    ``after`` as above."""
    ensure_ready()
    return _OPS.dequantize(codes, s0, theta, stored_dtype(spec, model_dtype), dtype, after, zero)


def fake_quantize(
    x: Tensor,
    s0: Tensor,
    theta: Tensor | None,
    spec: TensorSpec,
    model_dtype: torch.dtype,
    zero: Tensor | None = None,
    *,
    after: Tensor | None = None,
) -> Tensor:
    """``x`` through the grid and back, in its shape and dtype. Differentiable in ``x`` and theta (no LSQ factor);
    ``after`` as above."""
    ensure_ready()
    operator = _OPS.fake_quantize if torch.is_grad_enabled() else _OPS.fake_quantized
    return operator(x, s0, theta, grid_of(spec), stored_dtype(spec, model_dtype), after, zero)


def fake_quantize_backward_(
    grad: Tensor,
    x: Tensor,
    s0: Tensor,
    theta: Tensor | None,
    spec: TensorSpec,
    model_dtype: torch.dtype,
    zero: Tensor | None = None,
    *,
    factor: float,
    theta_gradient: bool,
) -> Tensor | None:
    """Gradients of :func:`fake_quantize` in one pass: theta's, times ``factor``, where wanted; that of ``x`` takes the
    place of ``grad``.

    ``grad`` is contiguous, in the shape and dtype of ``x``. Sums are fp32, in an order that depends on the shape alone.
    """
    ensure_ready()
    grad_theta = _OPS.fake_quantize_backward_(
        grad, x, s0, theta, grid_of(spec), stored_dtype(spec, model_dtype), factor, theta_gradient, zero
    )
    return grad_theta if theta_gradient else None


def masked_(grad: Tensor, mask: Tensor) -> Tensor:
    """``grad``, contiguous, made zero where the mask of :func:`quantize` says outside."""
    ensure_ready()
    _OPS.masked_(grad, mask)
    return grad


def amax(x: Tensor, count: int = 1) -> Tensor:
    """Largest magnitude of each of ``count`` equal consecutive parts: fp32 ``[count]``, NaN where there is one, 0 of
    nothing."""
    ensure_ready()
    return _OPS.amax(x, count)


def quantize_tokens(x: Tensor, spec: TensorSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Dynamic codes of ``x [..., features]``, and their fp32 scales and int8 zero points ``[..., n]``, of the ``n``
    groups of a token (one per token)."""
    ensure_ready()
    codes, scale, zero_point = _OPS.quantize_tokens(_token_groups(x, spec), grid_of(spec), spec.symmetric)
    return codes.view(x.shape), scale.flatten(x.dim() - 1), zero_point.flatten(x.dim() - 1)


def fake_quantize_tokens(x: Tensor, spec: TensorSpec, *, after: Tensor | None = None) -> Tensor:
    """Each token, or group of its features, of ``x [..., features]`` through its own grid and back. Differentiable;
    ``after`` as above."""
    ensure_ready()
    operator = _OPS.fake_quantize_tokens if torch.is_grad_enabled() else _OPS.fake_quantized_tokens
    values = operator(_token_groups(x, spec), grid_of(spec), spec.symmetric, after)
    return values.view(x.shape)


def fake_quantize_tokens_backward(grad: Tensor, x: Tensor, spec: TensorSpec) -> Tensor:
    """Gradient of :func:`fake_quantize_tokens`; ``grad`` has the shape and dtype of ``x``."""
    ensure_ready()
    grads, groups = _token_groups(grad, spec), _token_groups(x, spec)
    return _OPS.fake_quantize_tokens_backward(grads, groups, grid_of(spec), spec.symmetric).view(x.shape)


def _token_groups(x: Tensor, spec: TensorSpec) -> Tensor:
    """``x`` with the elements that share a scale along the last dimension."""
    return x if spec.group_size is None else x.unflatten(-1, (-1, spec.group_size))
