"""Operators implemented with the reference: the fallback without a compiler, and the expected results of the kernels.

Parameters are those of the operators' schemas (:mod:`quant.kernels.registration`), with each tensor of a scale passed
separately.
"""

from typing import Any

import torch
from torch import Tensor

from quant import reference
from quant.formats.packing import pack_bits, pack_nibbles, unpack_bits
from quant.spec import MX_GROUP, NVFP4_GROUP, Dtype, TensorSpec

# Specs whose scales are not stored as numbers of a dtype.
_STORED = {
    torch.float8_e8m0fnu: TensorSpec("fp4_e2m1", 4, "group", MX_GROUP),
    torch.float8_e4m3fn: TensorSpec("fp4_e2m1", 4, "group", NVFP4_GROUP),
}
_FLOATS: tuple[tuple[Dtype, int], ...] = (("fp8_e4m3", 8), ("fp4_e2m1", 4))


def effective_scale(
    s0: Tensor,
    theta: Tensor | None,
    scale_dtype: torch.dtype,
    after: Tensor | None = None,
    above: Tensor | None = None,
) -> Tensor:
    """Compute the effective scales, fp32, in s0's shape."""
    if above is not None:
        above = above.repeat_interleave(s0.numel() // above.numel()).view(s0.shape)
    scale = reference.effective_scale(s0, theta, _STORED.get(scale_dtype, _spec(8)), scale_dtype, above)
    return scale.clone() if scale is s0 else scale  # an operator must not return its argument


def quantize(
    x: Tensor,
    s0: Tensor,
    theta: Tensor | None,
    grid: int,
    scale_dtype: torch.dtype,
    mask: bool,
    zero: Tensor | None = None,
    above: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute codes of ``x``, and the packed mask of elements inside the range (empty without ``mask``)."""
    grid_of_rows = (_scales(s0, theta, scale_dtype, above), _spec(grid), _zeros(zero))
    rows = _rows(x, s0)
    codes = reference.quantize(rows, *grid_of_rows).reshape(x.shape)
    inside = torch.empty(0, dtype=torch.bool, device=x.device)
    if mask:
        inside = reference.inside_range(rows, *grid_of_rows)
    return codes, pack_bits(inside)


def quantize_with_values(
    x: Tensor,
    s0: Tensor,
    theta: Tensor | None,
    grid: int,
    scale_dtype: torch.dtype,
    mask: bool,
    zero: Tensor | None = None,
    above: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute codes, packed mask, and fake-quantized ``x``."""
    codes, inside = quantize(x, s0, theta, grid, scale_dtype, mask, zero, above)
    return codes, inside, fake_quantize(x, s0, theta, grid, scale_dtype, zero=zero, above=above)


def dequantize(
    codes: Tensor,
    s0: Tensor,
    theta: Tensor | None,
    scale_dtype: torch.dtype,
    dtype: torch.dtype,
    after: Tensor | None = None,
    zero: Tensor | None = None,
    above: Tensor | None = None,
) -> Tensor:
    """Compute ``(codes - zero) * scale`` in ``dtype``."""
    spec = _spec({torch.float8_e4m3fn: 0, torch.uint8: 1, torch.int8: 8}[codes.dtype])
    scale = _scales(s0, theta, scale_dtype, above)
    return reference.dequantize(_rows(codes, s0), scale, spec, dtype, _zeros(zero)).reshape(codes.shape)


def quantize_with_scale(
    x: Tensor, s0: Tensor, theta: Tensor | None, grid: int, scale_dtype: torch.dtype, *beside: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute codes of ``x``, and the effective scales, fp32, in s0's shape; ``beside`` are the arguments ``zero`` and
    ``above``."""
    codes, _ = quantize(x, s0, theta, grid, scale_dtype, False, *beside)
    return codes, effective_scale(s0, theta, scale_dtype, None, *beside[1:])


def dequantize_with_zeros(
    codes: Tensor, s0: Tensor, theta: Tensor, *others: Any, **named: Any
) -> tuple[Tensor, Tensor]:
    """Compute :func:`dequantize`, and zeros in the shape and dtype of theta."""
    return dequantize(codes, s0, theta, *others, **named), torch.zeros_like(theta)


def fake_quantize(
    x: Tensor,
    s0: Tensor,
    theta: Tensor | None,
    grid: int,
    scale_dtype: torch.dtype,
    after: Tensor | None = None,
    zero: Tensor | None = None,
    above: Tensor | None = None,
) -> Tensor:
    """Quantize and dequantize ``x``."""
    scale = _scales(s0, theta, scale_dtype, above)
    return reference.fake_quant(_rows(x, s0), scale, _spec(grid), _zeros(zero)).reshape(x.shape)


fake_quantized = fake_quantize


def fake_quantize_backward(
    grad: Tensor,
    x: Tensor,
    s0: Tensor,
    theta: Tensor | None,
    grid: int,
    scale_dtype: torch.dtype,
    factor: float,
    theta_gradient: bool,
    zero: Tensor | None = None,
    above: Tensor | None = None,
    of_weight: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of ``x`` and, times ``factor``, of theta (empty if not requested)."""
    grad_x, grad_scale = reference.fake_quant_backward(
        _rows(grad, s0),
        _rows(x, s0),
        _scales(s0, theta, scale_dtype, above),
        _spec(grid),
        _zeros(zero),
        scale_gradient=theta_gradient,
        of_weight=of_weight,
    )
    if theta is not None and x.numel() == 0:
        return grad_x.reshape(x.shape), torch.zeros_like(theta) if theta_gradient else x.new_empty(0)
    if theta is None or grad_scale is None:
        return grad_x.reshape(x.shape), x.new_empty(0)
    learned = effective_scale(s0, theta, torch.float32)
    return grad_x.reshape(x.shape), (grad_scale.reshape(s0.shape) * learned * factor).to(theta.dtype)


def fake_quantize_backward_(grad: Tensor, *arguments: Any) -> Tensor:
    """Return theta's gradient and overwrite ``grad`` with the gradient of ``x``; arguments as in
    :func:`fake_quantize_backward`."""
    grad_x, grad_theta = fake_quantize_backward(grad, *arguments)
    grad.copy_(grad_x)
    return grad_theta


def masked_(grad: Tensor, mask: Tensor) -> None:
    """Zero ``grad`` outside of the packed mask, in place."""
    grad.masked_fill_(~unpack_bits(mask, grad.shape), 0)


def masked(grad: Tensor, mask: Tensor) -> Tensor:
    """Copy ``grad``, with zeros outside of the packed mask."""
    return grad.contiguous().masked_fill(~unpack_bits(mask, grad.shape), 0)


def dequantize_and_mask_(
    grad: Tensor,
    mask: Tensor,
    codes: Tensor,
    s0: Tensor,
    theta: Tensor | None,
    scale_dtype: torch.dtype,
    zero: Tensor | None = None,
    above: Tensor | None = None,
) -> Tensor:
    """Apply :func:`masked_` to ``grad``, and :func:`dequantize` in its dtype to ``codes``."""
    masked_(grad, mask)
    return dequantize(codes, s0, theta, scale_dtype, grad.dtype, None, zero, above)


def amax(x: Tensor, count: int) -> Tensor:
    """Compute the largest magnitude of each of ``count`` segments, fp32; NaN for a segment with NaN."""
    if x.numel() == 0:
        return torch.zeros(count, device=x.device)
    return x.reshape(count, -1).abs().amax(1).float()


def quantize_tokens(
    x: Tensor, grid: int, symmetric: bool, scale_dtype: torch.dtype | None = None, above: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute codes, scales and zero points of each token or group."""
    spec = _token_spec(grid, symmetric, scale_dtype)
    if x.numel() == 0:
        scale = torch.ones((*x.shape[:-1], 1), device=x.device)
        return reference.quantize(x, torch.ones(1, device=x.device), spec), scale, scale.to(torch.int8).zero_()
    return reference.quantize_tokens(x.contiguous(), spec, above)


def keep_tokens(
    x: Tensor, grid: int, mask: bool, scale_dtype: torch.dtype | None = None, above: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute fake-quantized values, codes (e2m1: two in a byte), mask, and scales in their stored format."""
    codes, scale, _ = quantize_tokens(x, grid, True, scale_dtype, above)
    values = fake_quantize_tokens(x, grid, True, None, scale_dtype, above)
    clipped = x.new_empty(0, dtype=torch.uint8)
    if mask and x.numel() > 0:
        _, clipped = quantize(x, scale, None, grid, torch.float32, True)
    if grid == 1:
        codes = pack_nibbles(codes.view(-1, codes.shape[-1])).view(*codes.shape[:-1], -1)
    scale = scale if above is None or x.numel() == 0 else scale * above
    return values, codes, clipped, scale.to(scale_dtype or torch.float32)


def fake_quantize_tokens(
    x: Tensor,
    grid: int,
    symmetric: bool,
    after: Tensor | None = None,
    scale_dtype: torch.dtype | None = None,
    above: Tensor | None = None,
) -> Tensor:
    """Quantize and dequantize each token with its own grid."""
    if x.numel() == 0:
        return x.new_empty(x.shape)
    return reference.fake_quantize_tokens(x.contiguous(), _token_spec(grid, symmetric, scale_dtype), above)


fake_quantized_tokens = fake_quantize_tokens


def fake_quantize_tokens_backward(
    grad: Tensor,
    x: Tensor,
    grid: int,
    symmetric: bool,
    scale_dtype: torch.dtype | None = None,
    above: Tensor | None = None,
) -> Tensor:
    """Compute the gradient of ``x`` for :func:`fake_quantize_tokens`."""
    if x.numel() == 0:
        return x.new_empty(x.shape)
    spec = _token_spec(grid, symmetric, scale_dtype)
    return reference.fake_quantize_tokens_backward(grad.contiguous(), x.contiguous(), spec, above)


def fake_quantize_tokens_and_mask_(
    grad: Tensor, x: Tensor, grid: int, symmetric: bool, values: bool, *stored: Any
) -> Tensor:
    """Return :func:`fake_quantize_tokens` if ``values``, else an empty tensor; overwrite ``grad`` with the gradient of
    ``x``."""
    grad.copy_(fake_quantize_tokens_backward(grad, x, grid, symmetric, *stored))
    return fake_quantize_tokens(x, grid, symmetric, None, *stored) if values else x.new_empty(0)


def sum_rows(rows: Tensor, places: Tensor) -> Tensor:
    """Sum ``rows`` [N, H] at ``places`` [T, K] to [T, H]: one addition at a time from 0 on, each rounded."""
    sums = rows.new_zeros(places.shape[0], rows.shape[1])
    for column in places.unbind(1):
        sums += rows.index_select(0, column)
    return sums


def rms_norm_quantize(
    x: Tensor, weight: Tensor, eps: float, s0: Tensor, grid: int, scale_dtype: torch.dtype, mask: bool, values: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute codes, packed mask and values of a norm's result, and the reciprocal root of each row's mean square."""
    of_tensor = (_scales(s0, None, scale_dtype, None).view(1), _spec_of_tensor(grid))
    codes, inside, rounded, rstd = reference.rms_norm_quantize(x, weight, eps, *of_tensor)
    return *_wanted(codes, inside, rounded, mask, values), rstd


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, mask: Tensor, weight_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of ``x`` and the weight (empty if not requested)."""
    of_x, of_weight = reference.rms_norm_backward(grad, x, weight, rstd, unpack_bits(mask, x.shape))
    return of_x.contiguous(), of_weight if weight_gradient else weight.new_empty(0)


def silu_mul_quantize(
    gate: Tensor, up: Tensor, s0: Tensor, grid: int, scale_dtype: torch.dtype, mask: bool, values: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute codes, packed mask and values of ``silu(gate) * up``."""
    of_tensor = (_scales(s0, None, scale_dtype, None).view(1), _spec_of_tensor(grid))
    return _wanted(*reference.silu_mul_quantize(gate, up, *of_tensor), mask, values)


def silu_mul_backward(grad: Tensor, gate: Tensor, up: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gradients of gate and up."""
    of_gate, of_up = reference.silu_mul_backward(grad, gate, up, unpack_bits(mask, gate.shape))
    return of_gate.contiguous(), of_up.contiguous()


def _wanted(codes: Tensor, inside: Tensor, rounded: Tensor, mask: bool, values: bool) -> tuple[Tensor, Tensor, Tensor]:
    packed = pack_bits(inside if mask else inside.new_empty(0))
    return codes, packed, rounded.contiguous() if values else rounded.new_empty(0)


def _spec_of_tensor(grid: int) -> TensorSpec:
    return TensorSpec("fp8_e4m3", 8, "tensor") if grid == 0 else TensorSpec("int", abs(grid), "tensor", narrow=grid < 0)


def _spec(grid: int) -> TensorSpec:
    """Build the spec of a grid; the shapes of rows and scales determine which elements share a scale."""
    if grid == 1:
        return TensorSpec("fp4_e2m1", 4, "group", 16)
    return (
        TensorSpec("fp8_e4m3", 8, "channel") if grid == 0 else TensorSpec("int", abs(grid), "channel", narrow=grid < 0)
    )


def _token_spec(grid: int, symmetric: bool, scale_dtype: torch.dtype | None) -> TensorSpec:
    """Build the spec of a grid for tokens, or for groups, which are then the rows."""
    if scale_dtype in _STORED:
        stored = _STORED[scale_dtype]
        return TensorSpec(*_FLOATS[grid], "group", stored.group_size, dynamic=True, mx=stored.mx)
    if grid == 0:
        return TensorSpec("fp8_e4m3", 8, "token", dynamic=True)
    return TensorSpec("int", grid, "token", symmetric=symmetric, dynamic=True)


def _rows(x: Tensor, s0: Tensor) -> Tensor:
    """View ``x`` with the elements that share a scale as a row, contiguous like the operators' results."""
    return x.contiguous().reshape(s0.numel(), x.numel() // s0.numel())


def _scales(s0: Tensor, theta: Tensor | None, scale_dtype: torch.dtype, above: Tensor | None) -> Tensor:
    """Compute the effective scale of every row."""
    return effective_scale(s0, theta, scale_dtype, above=above).reshape(-1, 1)


def _zeros(zero: Tensor | None) -> Tensor | None:
    """Reshape zero points to one per row."""
    return None if zero is None else zero.reshape(-1, 1)
